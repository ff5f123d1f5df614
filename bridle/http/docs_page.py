"""The page at `/docs`: the API's description, read and tried in a browser. One file, nothing loaded from elsewhere, so
it works where there is no network."""

#: All content comes from `openapi.json` and is shown as text, never as HTML.
DOCS_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>bridle: API reference</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
pre, textarea, code, input { font: 14px/1.45 ui-monospace, monospace; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: .5rem; border: 1px solid #8886; border-radius: 6px; }
textarea, input { width: 100%; box-sizing: border-box; }
details { border: 1px solid #8886; border-radius: 6px; margin: .5rem 0; padding: .25rem .75rem; }
summary { cursor: pointer; }
summary b { display: inline-block; min-width: 4.5em; }
small { opacity: .7; }
</style>
</head>
<body>
<h1>API reference</h1>
<p><a href=".">Back</a> &middot; <a href="openapi.json">openapi.json</a></p>
<p><label>API key, if the server asks for one: <input id="key" type="password" autocomplete="off"></label></p>
<main id="routes">Loading ...</main>
<script>
const key = document.getElementById("key");
key.value = sessionStorage.getItem("key") || "";
key.onchange = () => sessionStorage.setItem("key", key.value);
const headers = more => key.value ? { ...more, Authorization: "Bearer " + key.value } : more;

function element(name, text, ...children) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

// A schema with its references written out, as deep as anybody reads.
function spelled(schema, known, depth) {
  if (!schema || typeof schema !== "object") return schema;
  if (Array.isArray(schema)) return schema.map(each => spelled(each, known, depth));
  if (schema.$ref) {
    const name = schema.$ref.split("/").pop();
    return depth ? spelled(known[name], known, depth - 1) : name;
  }
  return Object.fromEntries(Object.entries(schema)
    .filter(([name, value]) => name !== "title" || typeof value !== "string")
    .map(([name, value]) => [name, spelled(value, known, depth)]));
}

function example(schema) {
  const needed = schema && schema.required || [];
  const value = of => !of ? "" : of.type === "array" ? [] : of.type === "object" ? {} : of.type === "integer" ? 1 : "";
  const fields = needed.map(name => [name, value((schema.properties || {})[name])]);
  return JSON.stringify(Object.fromEntries(fields), null, 2);
}

function trial(path, method, schema) {
  const way = element("input"), body = element("textarea"), send = element("button", "Send"), out = element("pre");
  way.value = path.slice(1); body.rows = 6; body.value = schema ? example(schema) : "";
  send.onclick = async () => {
    out.textContent = "...";
    try {
      const options = { method, headers: headers(schema ? { "Content-Type": "application/json" } : {}) };
      if (schema) options.body = body.value;
      const answer = await fetch(way.value || ".", options);
      out.textContent = answer.status + "\\n\\n" + await answer.text();
    } catch (error) { out.textContent = error.message; }
  };
  return [element("h4", "Try it"), way, ...(schema ? [body] : []), send, out];
}

function operation(path, method, told, known) {
  const content = told.requestBody && told.requestBody.content["application/json"];
  const schema = content && spelled(content.schema, known, 4);
  const made = element("details", "", element("summary", "", element("b", method.toUpperCase()),
    element("code", path), element("small", "  " + (told.summary || ""))));
  made.ontoggle = () => {
    made.ontoggle = null;
    if (told.description) made.append(element("p", told.description));
    for (const each of told.parameters || [])
      made.append(element("p", each.name + " (" + each.in + (each.required ? ", required)" : ")")));
    if (schema) made.append(element("h4", "Body"), element("pre", JSON.stringify(schema, null, 2)));
    made.append(element("p", "Answers: " + Object.entries(told.responses || {})
      .map(([status, each]) => status + " " + each.description).join("; ")));
    made.append(...trial(path, method.toUpperCase(), schema));
  };
  return made;
}

(async () => {
  const routes = document.getElementById("routes");
  try {
    const answer = await fetch("openapi.json", { headers: headers({}) });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    const description = await answer.json();
    const known = (description.components || {}).schemas || {};
    routes.textContent = "";
    for (const [path, methods] of Object.entries(description.paths))
      for (const [method, told] of Object.entries(methods))
        routes.append(operation(path, method, told, known));
  } catch (error) { routes.textContent = error.message; }
})();
</script>
</body>
</html>
"""
