// A block of code in its colours, with a button that copies it.

import { createLowlight } from "lowlight"
import bash from "highlight.js/lib/languages/bash"
import cpp from "highlight.js/lib/languages/cpp"
import csharp from "highlight.js/lib/languages/csharp"
import css from "highlight.js/lib/languages/css"
import diff from "highlight.js/lib/languages/diff"
import go from "highlight.js/lib/languages/go"
import java from "highlight.js/lib/languages/java"
import javascript from "highlight.js/lib/languages/javascript"
import json from "highlight.js/lib/languages/json"
import markdown from "highlight.js/lib/languages/markdown"
import python from "highlight.js/lib/languages/python"
import rust from "highlight.js/lib/languages/rust"
import sql from "highlight.js/lib/languages/sql"
import typescript from "highlight.js/lib/languages/typescript"
import xml from "highlight.js/lib/languages/xml"
import yaml from "highlight.js/lib/languages/yaml"
import type { ComponentChildren } from "preact"
import { useMemo } from "preact/hooks"
import { useTold } from "./parts"
import { copy } from "./share"

interface Node { type: string; value?: string; children?: Node[]; properties?: { className?: string[] } }

const colours = createLowlight({
  bash, cpp, csharp, css, diff, go, java, javascript, json, markdown, python, rust, sql, typescript, xml, yaml,
})
/** Longer blocks stay plain: their colours would take too long. */
const MAX_COLOURED = 40_000

function elements(nodes: Node[]): ComponentChildren {
  return nodes.map((node, number) => node.type === "text" ? node.value
    : <span key={number} class={node.properties?.className?.join(" ")}>{elements(node.children ?? [])}</span>)
}

export function Code({ text, language }: { text: string; language: string }) {
  const [told, tell] = useTold()
  const shown = useMemo(() => {
    if (text.length > MAX_COLOURED || !colours.registered(language)) return text
    return elements(colours.highlight(language, text).children as Node[])
  }, [text, language])
  return (
    <figure class="code">
      <figcaption><span>{language}</span><span class="spring" />
        <button class="quiet" onClick={async () => tell((await copy(text)) ? "Copied" : "Not copied")}>{told || "Copy code"}</button>
      </figcaption>
      <pre tabIndex={0} aria-label={language ? `Code, ${language}` : "Code"}><code>{shown}</code></pre>
    </figure>
  )
}
