// Phrases that must not appear, taken back as soon as they do.
//
//     bridle run examples/phrase_ban.js
//
// Forbidding a token would forbid innocent words that begin like it. Here the model writes freely; when a phrase is
// complete, the text is rewound to where it began, and only the token that began it there is forbidden there.
import { detokenize, Label } from "aici"

const BANNED = ["had an idea", "very much", "The next day"]
const MAX_TOKENS = 60

/** Where in `tokens` a banned phrase begins that the last one completed, or -1. */
function offence(tokens) {
  const text = detokenize(tokens).decode()
  const phrase = BANNED.find((phrase) => text.includes(phrase))
  if (!phrase) return -1
  let begin = tokens.length - 1
  while (!detokenize(tokens.slice(begin)).decode().includes(phrase)) begin--
  return begin
}

async function main() {
  await $`Once upon a time`
  const story = new Label()
  const forbidden = new Map() // place -> tokens that must not stand there

  for (let length = 0; length < MAX_TOKENS; length = story.tokensSince().length) {
    const bias = (forbidden.get(length) ?? []).map((token) => [token, -100])
    if ((await gen({ maxTokens: 1, bias, stopAt: "\n" })) === "") break
    const tokens = story.tokensSince()
    const begin = offence(tokens)
    if (begin < 0) continue
    console.log("taken back:", detokenize(tokens.slice(begin)).decode())
    forbidden.set(begin, [...(forbidden.get(begin) ?? []), tokens[begin]])
    await new Label(story.ptr + begin).rewind()
  }
}

start(main)
