"""The page at `/`: what is served, how to call it, and a box to try it. One file, nothing loaded from
elsewhere."""

from __future__ import annotations

import json
from html import escape
from string import Template

from bridle.service import ModelRegistry

_NOTHING = "<li>nothing yet: a model is loaded when a request names it</li>"


def render_page(registry: ModelRegistry, base_url: str) -> str:
    """The HTML for a server reached at `base_url` (with a slash at its end)."""
    rows = "".join(
        f"<li><b>{escape(model.name)}</b> &middot; context {model.max_sequence_tokens:,} tokens &middot; "
        f"{escape(model.info.dtype)} on {escape(model.info.device)}</li>"
        for model in registry
    )
    adapters = [name for slot in registry.slots for name in registry.adapter_names(slot)]
    options = "".join(f"<option>{escape(name)}</option>" for name in (*registry.names, *adapters))
    return _PAGE.substitute(models=rows or _NOTHING, options=options, curl=escape(curl_line(registry, base_url)))


def curl_line(registry: ModelRegistry, base_url: str) -> str:
    """A command to paste into a shell."""
    names = registry.names or registry.loadable_names
    body = {"model": names[0] if names else "demo", "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    quoted = json.dumps(body).replace("'", "'\\''")
    return f"curl -N {base_url}v1/chat/completions -H 'Content-Type: application/json' -d '{quoted}'"


_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>bridle</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
pre, textarea, #out { font: 14px/1.45 ui-monospace, monospace; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: .75rem; border: 1px solid #8886; border-radius: 6px; }
textarea { width: 100%; box-sizing: border-box; padding: .5rem; }
#out { white-space: pre-wrap; min-height: 4em; }
#out.bad { color: #c33; }
button, select { font: inherit; }
small { opacity: .7; }
</style>
</head>
<body>
<h1>bridle</h1>
<p>This server speaks the OpenAI API. It serves:</p>
<ul>$models</ul>
<p>Try it from a shell:</p>
<pre>$curl</pre>
<p>or here:</p>
<form id="form">
<textarea id="prompt" rows="3" aria-label="Prompt">Tell me a short story.</textarea>
<p>
<select id="model" aria-label="Model">$options</select>
<select id="kind" aria-label="Kind"><option value="chat">chat</option><option value="text">continue</option></select>
<button id="go">Send</button> <button id="stop" type="button" disabled>Stop</button> <small id="stats"></small>
</p>
</form>
<pre id="out"></pre>
<p><a href="docs">API reference</a> &middot; <a href="v1/models">models</a> &middot; <a href="metrics">metrics</a>
&middot; <a href="health/ready">health</a></p>
<script>
const $$ = id => document.getElementById(id);
let abort = null;
$$("stop").onclick = () => abort && abort.abort();
$$("form").onsubmit = async event => {
  event.preventDefault();
  if (abort) return;
  abort = new AbortController();
  $$("out").textContent = ""; $$("out").className = ""; $$("stats").textContent = "";
  $$("go").disabled = true; $$("stop").disabled = false;
  try { await run($$("kind").value === "chat", $$("prompt").value); }
  catch (error) {
    if (error.name !== "AbortError") { $$("out").className = "bad"; $$("out").textContent += error.message; }
  }
  abort = null; $$("go").disabled = false; $$("stop").disabled = true;
};
async function run(isChat, text) {
  const body = { model: $$("model").value, max_tokens: 200, stream: true, stream_options: { include_usage: true } };
  if (isChat) body.messages = [{ role: "user", content: text }]; else body.prompt = text;
  const began = performance.now();
  const answer = await fetch(isChat ? "v1/chat/completions" : "v1/completions", {
    method: "POST", headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body), signal: abort.signal });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: {")) continue;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      for (const choice of chunk.choices)
        $$("out").textContent += (isChat ? choice.delta.content : choice.text) || "";
      if (chunk.usage) {
        const seconds = (performance.now() - began) / 1000;
        $$("stats").textContent = chunk.usage.completion_tokens + " tokens, "
          + (chunk.usage.completion_tokens / seconds).toFixed(1) + " per second";
      }
    }
  }
}
</script>
</body>
</html>
""")
