// The candidates of one token: how probable each was before the mask and after it. What the mask forbids stays in the list,
// struck through. Choosing a candidate forks the text there; a forbidden one is offered without the rule.

import { useState } from "preact/hooks"
import { Icon } from "./icons"
import type { Draw } from "./records"

export interface Candidate { token: number; text: string; before: number | null; after: number | null; isForbidden: boolean }
export type Choose = (token: number, text: string, isFree: boolean) => void

export const percent = (logprob: number) => {
  const value = 100 * Math.exp(Math.min(logprob, 0))
  return value >= 99.95 ? "100 %" : value >= 0.1 ? `${value.toFixed(1)} %` : value >= 5e-4 ? `${value.toFixed(3)} %` : "≈ 0 %"
}

/** A token as it can be seen: spaces, line ends and nothing at all have signs. */
export function visible(text: string): string {
  return text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅"
}

/** The candidates before and after the mask as one list. The mask alone keeps their order: one of the best that is not
 *  among the best of those left is forbidden. Biases change the order, so where there are some, that is not known. */
export function candidates(draw: Draw, hasBiases: boolean): Candidate[] {
  const { before, after, num_allowed: allowed, taken = 0 } = draw
  const found = new Map<number, Candidate>()
  const left = new Map((after?.top ?? []).map(([token, logprob]) => [token, logprob]))
  const isMasked = allowed != null && after != null
  before.top?.forEach(([token, logprob], number) => found.set(token, {
    token, text: before.texts?.[number] ?? String(token), before: logprob, after: after ? left.get(token) ?? null : logprob,
    isForbidden: isMasked && !hasBiases && !left.has(token),
  }))
  after?.top?.forEach(([token, logprob], number) => found.has(token) || found.set(token, {
    token, text: after.texts?.[number] ?? String(token), before: hasBiases ? null : logprob + Math.log(Math.max(1 - taken, 1e-30)),
    after: logprob, isForbidden: false,
  }))
  return [...found.values()].sort((a, b) => (b.before ?? b.after ?? 0) - (a.before ?? a.after ?? 0))
}

const width = (logprob: number | null) => ({ width: `${logprob === null ? 0 : 100 * Math.exp(Math.min(logprob, 0))}%` })

function Row({ each, isThis, isSteered, onChoose }: { each: Candidate; isThis: boolean; isSteered: boolean; onChoose: Choose | null }) {
  const [isAsking, setAsking] = useState(false)
  const name = visible(each.text)
  const row = (
    <>
      {isSteered && <i class="bar was" style={width(each.before)} />}
      <i class="bar" style={width(each.after)} />
      {each.isForbidden ? <s><code>{name}</code></s> : <code>{name}</code>}
      {onChoose && !isThis && <Icon name="fork" />}
      {isSteered && <span class="share was">{each.before === null ? "–" : percent(each.before)}</span>}
      <span class="share">{each.isForbidden ? "forbidden" : each.after === null ? "–" : percent(each.after)}</span>
    </>
  )
  const kind = `odd${isSteered ? " steered" : ""}`
  if (!onChoose || isThis) return <div class={`${kind}${isThis ? " this" : ""}`} aria-current={isThis ? "true" : undefined}>{row}</div>
  if (!each.isForbidden)
    return (
      <button class={kind} title="Fork here, and go on with this token" onClick={() => onChoose(each.token, each.text, false)}>
        <span class="offscreen">Fork here and go on with </span>{row}</button>
    )
  return (
    <>
      <button class={`${kind} forbidden`} aria-expanded={isAsking} onClick={() => setAsking(!isAsking)}>{row}</button>
      {isAsking && (
        <p class="ask-free">The rule forbids it. <button class="quiet" onClick={() => onChoose(each.token, each.text, true)}>
          Continue without the rule</button></p>
      )}
    </>
  )
}

/** `onChoose` is null where the text cannot fork. */
export function Candidates({ draw, token, hasBiases, onChoose }: {
  draw: Draw; token?: number; hasBiases: boolean; onChoose: Choose | null
}) {
  const isSteered = draw.after != null
  return (
    <section>
      <h2>Candidates</h2>
      {isSteered && <p class="odds-head"><span>before the mask</span><span>after it</span></p>}
      <ol class="odds">
        {candidates(draw, hasBiases).map(each => (
          <li key={each.token}><Row each={each} isThis={each.token === token} isSteered={isSteered} onChoose={onChoose} /></li>
        ))}
      </ol>
    </section>
  )
}
