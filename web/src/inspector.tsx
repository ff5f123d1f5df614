// What there is to say about one token: where it came from, what it was drawn from, what the mask left, how long it took.
// The alternatives are buttons: the text forks there and goes on with another token.

import { forkAt } from "./fork"
import { Icon } from "./icons"
import type { Draw, Odds } from "./records"
import { type Run, beside, current } from "./runs"
import { forkInChat } from "./talk"
import { type Looked, looked } from "./tokens"

export const percent = (logprob: number) => {
  const value = 100 * Math.exp(Math.min(logprob, 0))
  return value >= 99.95 ? "100 %" : value >= 0.1 ? `${value.toFixed(1)} %` : value >= 5e-4 ? `${value.toFixed(3)} %` : "≈ 0 %"
}
const millis = (seconds: number | undefined) => (seconds === undefined ? "" : `${(seconds * 1000).toFixed(2)} ms`)

/** A token as it can be seen: spaces, line ends and nothing at all have signs. */
export function visible(text: string): string {
  return text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅"
}

const WORDS: Record<string, string> = {
  prompt: "Part of the prompt", cached: "Part of the prompt, found in the cache", sampled: "Drawn by the model",
  drafted: "Drawn, and guessed ahead", forced: "Forced", fought: "Drawn against the model's wish", rewound: "Taken back",
}

function forkFrom({ run, line, number }: Looked, token: number, text: string): void {
  const at = line!.alive.indexOf(number)
  if (at < 0) return
  if (run.kind === "chat") return forkInChat(run, line!.index, at, token, text)
  const forked = forkAt(run, line!.index, at, token, text)
  if (run.kind === "steer") current.steer.value = forked
  else current.complete.value = forked
  if (beside.left.value === run) beside.right.value = forked
}

function Alternatives({ odds, token, title, onChoose }: {
  odds: Odds; token?: number; title: string; onChoose: ((token: number, text: string) => void) | null
}) {
  return (
    <section>
      <h2>{title}</h2>
      <ol class="odds">
        {(odds.top ?? []).map(([each, logprob], number) => {
          const text = odds.texts?.[number] ?? String(each)
          const row = (
            <>
              <i class="bar" style={{ width: `${100 * Math.exp(Math.min(logprob, 0))}%` }} />
              <code>{visible(text)}</code>{onChoose && each !== token && <Icon name="fork" />}<span class="share">{percent(logprob)}</span>
            </>
          )
          const isThis = each === token
          return (
            <li key={each}>
              {onChoose && !isThis
                ? <button class="odd" title="Fork here, and go on with this token" onClick={() => onChoose(each, text)}
                    aria-label={`Fork here and go on with ${visible(text)}, ${percent(logprob)}`}>{row}</button>
                : <div class={isThis ? "odd this" : "odd"} aria-current={isThis ? "true" : undefined}>{row}</div>}
            </li>
          )
        })}
      </ol>
    </section>
  )
}

function Drawn({ draw, token, onChoose }: {
  draw: Draw; token?: number; onChoose: ((token: number, text: string) => void) | null
}) {
  const { before, after, num_allowed: allowed, taken = 0 } = draw
  return (
    <>
      <dl class="facts">
        <dt>Probability</dt><dd>{percent((after ?? before).logprob)}{(after ?? before).rank ? `, rank ${(after ?? before).rank}` : ""}</dd>
        {after && <><dt>Without steering</dt><dd>{percent(before.logprob)}{before.rank ? `, rank ${before.rank}` : ""}</dd></>}
        <dt>Allowed</dt><dd>{allowed == null ? "all tokens" : `${allowed.toLocaleString("en")} token${allowed === 1 ? "" : "s"}`}</dd>
        {allowed != null && <><dt>Mask took</dt><dd>{percent(Math.log(taken))}</dd></>}
      </dl>
      {after && <Alternatives odds={after} token={token} title="What was left" onChoose={onChoose} />}
      <Alternatives odds={before} token={token} title={after ? "What the model wanted" : "Alternatives"} onChoose={onChoose} />
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
  const choose = canFork(run, now) ? (id: number, text: string) => forkFrom(now, id, text) : null
  return (
    <div class="inspector" id="inspector" tabIndex={-1} role="region" aria-label="Token">
      <header>
        <code class={`token-name ${piece.origin}`}>{visible(record?.spelled || piece.text)}</code>
      </header>
      <p class="origin" aria-live="polite">
        {WORDS[piece.origin]}{record?.by ? ` by ${record.by}` : ""}<small> · token {piece.token ?? "?"}</small>
      </p>
      {record?.draw && <Drawn draw={record.draw} token={piece.token} onChoose={choose} />}
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
