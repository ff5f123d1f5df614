// What the server does at the moment, for those who run it: requests, queue, cache, controllers, policies.

import { useEffect, useState } from "preact/hooks"
import { ApiError, look, models, post, read, textAt } from "./api"
import { Notice } from "./parts"

const PAUSE = 1000
const MAX_ROWS = 100

interface Engine { [name: string]: any }
interface Status {
  version: string; uptime: number; in_flight: Record<string, number>; num_requests: number
  models: { name: string; state: string; device?: string; max_num_seqs?: number; block_size?: number; control?: Control; policy_control?: Control
    kv_blocks?: Record<string, number>; engine?: Engine }[]
  requests: Record<string, any>[]
}
type Control = { is_up: boolean; restarts: number } | null
interface Policies { policies: Record<string, any>[]; error: string | null }

const count = (value: unknown) => Number(value ?? 0).toLocaleString("en")

/** Asks again and again as long as it is shown. */
function useStatus(): [Status | null, Policies | null, string, string] {
  const [status, setStatus] = useState<Status | null>(null)
  const [policies, setPolicies] = useState<Policies | null>(null)
  const [metrics, setMetrics] = useState("")
  const [trouble, setTrouble] = useState("")
  useEffect(() => {
    let timer = 0
    let isOver = false
    const ask = async () => {
      try {
        const [now, rules] = [await read("v1/status"), await read("v1/policies")]
        if (isOver) return
        setStatus(now)
        setPolicies(rules)
        if (rules.policies.length) setMetrics(await textAt("metrics"))
        setTrouble("")
      } catch (error) {
        const isDenied = error instanceof ApiError && error.status === 403
        setTrouble(isDenied ? "This page needs the key of an admin." : (error as Error).message)
      }
      if (!isOver) timer = window.setTimeout(ask, PAUSE)
    }
    void ask()
    return () => {
      isOver = true
      clearTimeout(timer)
    }
  }, [])
  return [status, policies, metrics, trouble]
}

function Bar({ name, now, most }: { name: string; now: number; most: number }) {
  const share = most > 0 ? Math.min(now / most, 1) : 0
  return (
    <div class="meter">
      <span>{name}</span>
      <span class="meter-bar" role="meter" aria-label={name} aria-valuemin={0} aria-valuemax={most} aria-valuenow={now}>
        <i style={{ width: `${100 * share}%` }} /></span>
      <b>{count(now)}{most > 0 && ` of ${count(most)}`}</b>
    </div>
  )
}

function controlOf(control: Control | undefined): string {
  if (!control) return "off"
  return `${control.is_up ? "running" : "starting again"}${control.restarts ? `, restarted ${control.restarts} times` : ""}`
}

/** Loads a model that is not, or closes one that nobody uses. */
function Loading({ name, state }: { name: string; state: string }) {
  const [trouble, setTrouble] = useState("")
  const [isBusy, setBusy] = useState(false)
  const isLoaded = state === "loaded"
  const act = async () => {
    setBusy(true)
    setTrouble("")
    await post(`v1/models/${isLoaded ? "unload" : "load"}`, { model: name }).then(look).catch(error => setTrouble((error as Error).message))
    setBusy(false)
  }
  return (
    <>
      <div class="row"><button disabled={isBusy || state === "loading"} onClick={() => void act()}>{isLoaded ? `Unload ${name}` : `Load ${name}`}</button></div>
      {trouble && <Notice text={trouble} />}
    </>
  )
}

/** The KV blocks that each user's requests hold. */
function UsersOf({ blocks, size }: { blocks: Record<string, number>; size: number }) {
  const rows = Object.entries(blocks).filter(([, count]) => count > 0).sort((a, b) => b[1] - a[1])
  const text = rows.map(([user, held]) => `${user || "no user"} ${count(held)} blocks of ${count(size)} tokens`).join(", ")
  return <><dt>KV blocks of each user</dt><dd>{text || "none"}</dd></>
}

/** Models that could be loaded, and are not known to the status yet. */
const loadable = (status: Status) => models.value
  .filter(each => !each.parent && (each.root ?? each.id) === each.id && !status.models.some(model => model.name === each.id))
  .map(each => ({ name: each.id, state: each.state }))

function ModelOf({ model }: { model: Status["models"][number] }) {
  const engine = model.engine
  if (!engine) return <section class="card"><h2>{model.name}</h2><p>{model.state}</p><Loading name={model.name} state={model.state} /></section>
  const prompt = engine.num_prompt_tokens || 0
  return (
    <section class="card">
      <h2>{model.name}</h2>
      <p class="told-small">{model.state} on {model.device} · controllers {controlOf(model.control)} · policies {controlOf(model.policy_control)}</p>
      <Bar name="Sequences in the batch" now={engine.num_running} most={model.max_num_seqs ?? 0} />
      <Bar name="Sequences in the queue" now={engine.num_waiting} most={0} />
      <Bar name="KV blocks in use" now={engine.num_blocks - engine.num_free_blocks} most={engine.num_blocks} />
      <dl class="facts">
        <UsersOf blocks={model.kv_blocks ?? {}} size={model.block_size ?? 0} />
        <dt>Sequences that wait for a controller</dt><dd>{count(engine.num_suspended)}</dd>
        <dt>Tokens sampled, forced, rolled back</dt>
        <dd>{count(engine.num_sampled_tokens)}, {count(engine.num_forced_tokens)}, {count(engine.num_rewound_tokens)}</dd>
        <dt>Prompt tokens found in the cache</dt><dd>{count(engine.num_cached_tokens)}{prompt ? ` of ${count(prompt + engine.num_cached_tokens)}` : ""}</dd>
        <dt>Time in controllers</dt><dd>{Number(engine.control_seconds).toFixed(2)} s of {Number(engine.step_seconds).toFixed(2)} s</dd>
        <dt>Forks, preemptions, late answers</dt>
        <dd>{count(engine.num_forks)}, {count(engine.num_preemptions)}, {count(engine.num_late_answers)}</dd>
      </dl>
      <Loading name={model.name} state={model.state} />
    </section>
  )
}

const HEADS: [string, string][] = [["user", "User"], ["route", "Route"], ["model", "Model"], ["state", "State"], ["age", "Seconds"],
  ["prompt_tokens", "Prompt"], ["output_tokens", "Output"], ["controller", "Controller"], ["constraint", "Constraint"]]

function Requests({ status }: { status: Status }) {
  const rows = status.requests.slice(0, MAX_ROWS)
  const heads = HEADS.filter(([name]) => rows.some(row => row[name] !== undefined && row[name] !== null))
  if (!rows.length) return <p class="told-small">No request at the moment.</p>
  return (
    <div class="table" tabIndex={0} role="group" aria-label="Requests">
      <table>
        <thead><tr>{heads.map(([name, head]) => <th key={name}>{head}</th>)}</tr></thead>
        <tbody>{rows.map(row => (
          <tr key={row.id}>{heads.map(([name]) => <td key={name}>{typeof row[name] === "number" ? count(row[name]) : String(row[name] ?? "")}</td>)}</tr>))}
        </tbody>
      </table>
    </div>
  )
}

/** What a policy did, and how often: "banned 3, replaced 1". */
function effects(metrics: string, policy: string): string {
  const found = [...metrics.matchAll(/^bridle_policy_actions_total\{([^}]*)\} (\S+)/gm)]
    .map(([, labels, value]) => ({ ...Object.fromEntries([...labels.matchAll(/(\w+)="((?:\\.|[^"\\])*)"/g)].map(each => [each[1], each[2]])), value }) as Record<string, string>)
    .filter(row => row.policy === policy)
  return found.map(row => `${row.action} ${count(row.value)}`).join(", ")
}

function Rules({ policies, metrics }: { policies: Policies; metrics: string }) {
  return (
    <>
      {policies.error && <Notice text={policies.error} />}
      {policies.policies.length ? (
        <ul class="rules">{policies.policies.map((policy, number) => (
          <li key={number}><b>{String(policy.name ?? number + 1)}</b> <span class="told-small">{effects(metrics, String(policy.name)) || "no effect yet"}</span>
            <dl class="facts">{Object.entries(policy).filter(([name, value]) => name !== "name" && value !== null && value !== undefined)
              .map(([name, value]) => [<dt key={name}>{name}</dt>, <dd key={`${name} `}>{typeof value === "object" ? JSON.stringify(value) : String(value)}</dd>])}</dl>
          </li>))}
        </ul>
      ) : <p class="told-small">No policy is in force. <code>--policies FILE</code> sets some.</p>}
    </>
  )
}

export function Server() {
  const [status, policies, metrics, trouble] = useStatus()
  return (
    <div class="page">
      <div class="column wide server">
        {trouble && <Notice text={trouble} />}
        {status && (
          <>
            <p class="told-small">bridle {status.version}, for {count(Math.round(status.uptime / 60))} minutes ·{" "}
              {count(status.in_flight.requests)} of {count(status.in_flight.max_requests)} requests · {count(status.in_flight.refused)} refused</p>
            {[...status.models, ...loadable(status)].map(model => <ModelOf key={model.name} model={model} />)}
            <h2>Requests</h2>
            <Requests status={status} />
          </>
        )}
        {policies && <><h2>Policies</h2><Rules policies={policies} metrics={metrics} /></>}
      </div>
    </div>
  )
}
