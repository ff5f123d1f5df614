// What there is to say about one token: where it came from, its candidates before and after the mask, how long it took.

import { effect } from "@preact/signals"
import { forkAt } from "./fork"
import { Candidates, type Choose, percent, visible } from "./odds"
import type { Draw } from "./records"
import { openRun } from "./programs"
import { type Run, beside } from "./runs"
import { forkInChat } from "./talk"
import { type Looked, looked, pinned } from "./tokens"

const millis = (seconds: number | undefined) => (seconds === undefined ? "" : `${(seconds * 1000).toFixed(2)} ms`)

const WORDS: Record<string, string> = {
  prompt: "Part of the prompt", cached: "Part of the prompt, found in the cache", sampled: "Sampled by the model",
  drafted: "Sampled, and predicted as a draft token", forced: "Forced",
  fought: "Sampled where the mask removed most of the probability", rewound: "Rolled back",
}

/** Forks at the token that is looked at, and then looks at the one that was chosen. */
function forkFrom({ run, line, number }: Looked, token: number, text: string, isFree: boolean): void {
  const at = line!.alive.indexOf(number)
  if (at < 0) return
  const place = { output: line!.index, at, chosen: token, text }
  const forked = run.kind === "chat" ? forkInChat(run, place, isFree) : forkAt(run, place, { isFree })
  if (!forked) return
  if (run.kind !== "chat" && run !== beside.left.value) openRun(forked)
  if (beside.left.value === run) beside.right.value = forked
  lookAtChosen(forked, looked.value)
}

/** Looks at the token that made a run a fork, as soon as it is there, unless its reader has looked elsewhere. */
function lookAtChosen(run: Run, before: Looked | null): void {
  pinned.value = null
  const end = effect(() => {
    run.version.value
    if (looked.value !== before) return void queueMicrotask(() => end())
    const line = run.story.lines.get(run.selected.value)
    const number = line?.pieces.findIndex(piece => piece.record?.type === "token" && piece.record.by === "you") ?? -1
    if (number < 0 || !line) return
    looked.value = pinned.value = { run, line, number, piece: line.pieces[number] }
  })
}

function Drawn({ draw, token, hasBiases, onChoose }: { draw: Draw; token?: number; hasBiases: boolean; onChoose: Choose | null }) {
  const { before, after, num_allowed: allowed, taken = 0 } = draw
  return (
    <>
      <dl class="facts">
        <dt>Probability</dt><dd>{percent((after ?? before).logprob)}{(after ?? before).rank ? `, rank ${(after ?? before).rank}` : ""}</dd>
        {after && <><dt>Without steering</dt><dd>{percent(before.logprob)}{before.rank ? `, rank ${before.rank}` : ""}</dd></>}
        <dt>Allowed</dt><dd>{allowed == null ? "all tokens" : `${allowed.toLocaleString("en")} token${allowed === 1 ? "" : "s"}`}</dd>
        {allowed != null && <><dt>Mask removed</dt><dd>{percent(Math.log(taken))}</dd></>}
      </dl>
      <Candidates draw={draw} token={token} hasBiases={hasBiases} onChoose={onChoose} />
    </>
  )
}

function canFork(run: Run, { line, number, piece }: Looked): boolean {
  return line !== null && piece.origin !== "rewound" && line.alive.includes(number) && run.story.promptTokens.length > 0
}

export function Inspector() {
  const now = looked.value
  if (!now)
    return (
      <div class="inspector empty">
        <p>Point at a token, or walk along a text with the arrow keys, to see where it came from. Choose one of its
        alternatives, and the text forks there.</p>
      </div>
    )
  const { run, piece } = now
  const record = piece.record
  const token = record?.type === "token" ? record : null
  const cost = token?.cost
  const choose: Choose | null = canFork(run, now) ? (id: number, text: string, isFree: boolean) => forkFrom(now, id, text, isFree) : null
  return (
    <div class="inspector" id="inspector" tabIndex={-1} role="region" aria-label="Token">
      <header>
        <code class={`token-name ${piece.origin}`}>{visible(record?.spelled || piece.text)}</code>
      </header>
      <p class="origin" aria-live="polite">
        {WORDS[piece.origin]}{record?.by ? ` by ${record.by}` : ""}<small> · token {piece.token ?? "?"}</small>
      </p>
      {record?.draw && <Drawn draw={record.draw} token={piece.token} hasBiases={!!token?.num_biases} onChoose={choose} />}
      {token && (
        <dl class="facts">
          <dt>Step</dt><dd>{token.step}{cost ? `, with ${cost.num_rows} sequence${cost.num_rows === 1 ? "" : "s"}` : ""}</dd>
          {cost && <><dt>Forward</dt><dd>{millis(cost.forward)}</dd><dt>Drawing</dt><dd>{millis(cost.sample)}</dd></>}
          {cost && cost.wait > 0 && <><dt>Waited</dt><dd>{millis(cost.wait)}</dd></>}
          {token.answer !== undefined && token.answer > 0 && <><dt>Controller</dt><dd>{millis(token.answer)}</dd></>}
          {!!token.num_biases && <><dt>Biases</dt><dd>{token.num_biases}</dd></>}
        </dl>
      )}
    </div>
  )
}
