// The playground: one page for every server.

import { effect } from "@preact/signals"
import { render } from "preact"
import { useState } from "preact/hooks"
import { key, look, models, needsKey, setKey, trouble } from "./api"
import { Chat } from "./chat"
import { Compare } from "./compare"
import { Complete } from "./complete"
import { Icon, type IconName } from "./icons"
import { keepRuns } from "./keep"
import { openLink } from "./links"
import { Panel, panel } from "./panel"
import { Notice } from "./parts"
import { type View, model, theme, view } from "./settings"
import { Server } from "./server"
import { Sidebar } from "./sidebar"
import { Steer } from "./steer"
import { loadTalks } from "./talks"
import { looked, pinned } from "./tokens"
import { Undo } from "./undo"

const VIEWS: [View, string][] = [["chat", "Chat"], ["complete", "Complete"], ["steer", "Steer"], ["compare", "Compare"], ["server", "Server"]]
const THEMES: Record<string, [string, IconName, string]> = {
  auto: ["light", "auto", "as the system has it"], light: ["dark", "light", "light"], dark: ["auto", "dark", "dark"],
}

function KeyForm() {
  const [draft, setDraft] = useState(key.value)
  const send = (event: Event) => {
    event.preventDefault()
    setKey(draft.trim())
    void look()
  }
  return (
    <form class="key-form" onSubmit={send}>
      <label for="key">API key</label>
      <input id="key" type="password" autocomplete="off" value={draft} onInput={event => setDraft(event.currentTarget.value)}
        placeholder="kept until this tab is closed" />
      <button class="primary">Use</button>
    </form>
  )
}

function Models() {
  const rows = models.value.filter(each => (each.task ?? "generate") === "generate")
  const chosen = rows.find(each => each.id === model.value)
  return (
    <label class="model">
      <span class="offscreen">Model</span>
      <select id="model" value={model.value} onChange={event => (model.value = event.currentTarget.value)}
        title={chosen?.max_model_len ? `context of ${chosen.max_model_len.toLocaleString("en")} tokens` : ""}>
        {!rows.length && <option value="">no model yet</option>}
        {rows.map(each => (
          <option key={each.id} value={each.id}>{each.parent ? `${each.id} (adapter of ${each.parent})` : each.id}{each.state === "loaded" ? "" : ` · ${each.state}`}</option>
        ))}
      </select>
    </label>
  )
}

function App() {
  const [hasHistory, setHistory] = useState(false)
  const [hasPanel, setPanel] = useState(false)
  const [hasKey, setHasKey] = useState(false)
  const [next, sign, name] = THEMES[theme.value] ?? THEMES.auto
  const asksKey = hasKey || needsKey.value
  return (
    <div class={`app view-${view.value}`}>
      <header class="top">
        <button class="quiet icon only-narrow history" aria-label="History" aria-expanded={hasHistory} onClick={() => setHistory(!hasHistory)}><Icon name="menu" /></button>
        <a class="brand" href="." aria-label="bridle"><svg viewBox="0 0 24 24" aria-hidden="true"><path d="M4 5c6 0 6 14 16 14M4 12h16M4 19c4 0 6-3 8-7s4-7 8-7" /></svg><b>bridle</b></a>
        <nav class="views" role="tablist" aria-label="Views">
          {VIEWS.map(([id, label]) => (
            <button key={id} role="tab" aria-selected={view.value === id} onClick={() => { view.value = id; looked.value = pinned.value = null }}>{label}</button>
          ))}
        </nav>
        <span class="spring" />
        <Models />
        <button class="quiet icon" aria-label="API key" title="API key" aria-expanded={asksKey} onClick={() => setHasKey(!hasKey)}><Icon name="key" /></button>
        <button class="quiet icon" aria-label={`Theme: ${name}`} title={name} onClick={() => (theme.value = next)}><Icon name={sign} /></button>
        <button class="quiet icon only-narrow" aria-label="Settings" aria-expanded={hasPanel}
          onClick={() => { panel.value = "settings"; setPanel(!hasPanel) }}><Icon name="sliders" /></button>
      </header>
      {(asksKey || trouble.value) && (
        <div class="banner">
          {trouble.value && <Notice text={trouble.value} />}
          {asksKey && <KeyForm />}
          {trouble.value && !asksKey && <button class="quiet" onClick={() => void look()}>Try again</button>}
        </div>
      )}
      <Sidebar isOpen={hasHistory} onDone={() => setHistory(false)} />
      {(hasHistory || hasPanel) && <div class="shade" onClick={() => { setHistory(false); setPanel(false) }} />}
      <main>
        <h1 class="offscreen">{VIEWS.find(([id]) => id === view.value)![1]}</h1>
        {view.value === "chat" ? <Chat /> : view.value === "complete" ? <Complete /> : view.value === "steer" ? <Steer /> : view.value === "compare" ? <Compare /> : <Server />}
      </main>
      <Panel isOpen={hasPanel || (pinned.value !== null && panel.value === "token")}
        onClose={() => { setPanel(false); pinned.value = looked.value = null }} />
      <Undo />
    </div>
  )
}

effect(() => {
  if (pinned.value) panel.value = "token"
})
void look().then(openLink).then(wrong => { if (wrong) trouble.value = wrong })
void loadTalks()
void keepRuns()
render(<App />, document.getElementById("app")!)
