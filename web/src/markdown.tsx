// Markdown as elements of the page. Nothing becomes HTML from text: the parser's tokens are made into elements one by one,
// tags stay text, links lead to other pages only, and pictures are links.

import { Marked, type Token, type Tokens } from "marked"
import { Component, type ComponentChildren } from "preact"
import { Code } from "./code"
import { Maths } from "./maths"

interface MathToken { type: "maths"; raw: string; text: string; isBlock: boolean }

const INLINE = /^(?:\$(?!\s)((?:\\.|[^\\$\n])+?)(?<!\s)\$(?!\d)|\\\(([^\n]+?)\\\))/
const BLOCK = /^(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])/

function mathsRule(name: string, level: "inline" | "block", rule: RegExp, opening: RegExp) {
  return {
    name, level,
    start: (text: string) => text.match(opening)?.index,
    tokenizer(text: string): MathToken | undefined {
      const found = rule.exec(text)
      return found ? { type: "maths", raw: found[0], text: (found[1] ?? found[2]).trim(), isBlock: level === "block" || rule === BLOCK } : undefined
    },
    renderer: () => "",
  }
}

const marked = new Marked({ gfm: true, breaks: false })
marked.use({ extensions: [
  mathsRule("mathsBlock", "block", BLOCK, /\$\$|\\\[/), mathsRule("mathsShown", "inline", BLOCK, /\$\$|\\\[/),
  mathsRule("maths", "inline", INLINE, /\$|\\\(/),
] })

const isAddress = (href: string) => /^(?:https?:|mailto:)/i.test(href)

function link(href: string, children: ComponentChildren, key: number) {
  if (!isAddress(href)) return <span key={key}>{children}</span>
  return <a key={key} href={href} target="_blank" rel="noopener noreferrer">{children}</a>
}

function list(token: Tokens.List, key: number) {
  const items = token.items.map((item, number) => (
    <li key={number}>
      {item.task && <input type="checkbox" checked={item.checked} disabled aria-label={item.checked ? "done" : "to do"} />}
      {shown(item.tokens.filter(each => each.type !== "checkbox"))}
    </li>
  ))
  return token.ordered ? <ol key={key} start={Number(token.start) || 1}>{items}</ol> : <ul key={key}>{items}</ul>
}

function table(token: Tokens.Table, key: number) {
  const side = (number: number) => (token.align[number] ? `to-${token.align[number]}` : undefined)
  return (
    <div key={key} class="table" tabIndex={0} role="group" aria-label="Table">
      <table>
        <thead><tr>{token.header.map((cell, number) => <th key={number} class={side(number)}>{shown(cell.tokens)}</th>)}</tr></thead>
        <tbody>
          {token.rows.map((row, at) => (
            <tr key={at}>{row.map((cell, number) => <td key={number} class={side(number)}>{shown(cell.tokens)}</td>)}</tr>))}
        </tbody>
      </table>
    </div>
  )
}

function element(token: Token, key: number): ComponentChildren {
  const inner = () => shown((token as Tokens.Paragraph).tokens ?? [])
  switch (token.type) {
    case "space": case "def": return null
    case "paragraph": return <p key={key}>{inner()}</p>
    // The page has headings of its own above those of a text.
    case "heading": return <p key={key} class={`heading h${token.depth}`} role="heading" aria-level={Math.min(token.depth + 1, 6)}>{inner()}</p>
    case "code": return <Code key={key} text={token.text} language={token.lang?.match(/\S+/)?.[0] ?? ""} />
    case "blockquote": return <blockquote key={key}>{inner()}</blockquote>
    case "list": return list(token as Tokens.List, key)
    case "table": return table(token as Tokens.Table, key)
    case "hr": return <hr key={key} />
    case "br": return <br key={key} />
    case "strong": return <strong key={key}>{inner()}</strong>
    case "em": return <em key={key}>{inner()}</em>
    case "del": return <del key={key}>{inner()}</del>
    case "codespan": return <code key={key}>{token.text}</code>
    case "link": return link(token.href, inner(), key)
    case "image": return link(token.href, token.text || token.href, key)
    case "escape": return token.text
    case "maths": return <Maths key={key} text={token.text} isBlock={token.isBlock} />
    case "text": return (token as Tokens.Text).tokens ? inner() : token.text
    default: return token.raw // tags, and what a later parser may know
  }
}

const shown = (tokens: Token[]): ComponentChildren => tokens.map(element)

/** A block of a text; it is drawn again only if its text changes. */
class Block extends Component<{ token: Token }> {
  override shouldComponentUpdate(next: { token: Token }): boolean {
    return next.token.raw !== this.props.token.raw
  }

  override render({ token }: { token: Token }) {
    return element(token, 0)
  }
}

export function Markdown({ text }: { text: string }) {
  return <div class="markdown">{marked.lexer(text).map((token, number) => <Block key={number} token={token} />)}</div>
}
