// Self-consistency: forks of one prompt answer side by side, and the most frequent answer counts.
//
//     bridle run examples/recipes/vote.js
//
// The prompt is computed once. Each fork works with a temperature and leaves its answer in a variable. The first fork
// waits for the others and writes what most of them found. A tie goes to the answer of the first fork, which is greedy.
import { getPrompt, Label, setVar } from "aici"

const QUESTION = "What is 23 + 45?"
const VOTERS = 5
const MAX_TOKENS = 80

/** The last number of a text, or nothing. */
function lastNumber(text) {
  return (text.match(/\d[\d,]*/g) ?? []).at(-1)?.replaceAll(",", "") ?? ""
}

async function main() {
  if ((await getPrompt()).length < 2) await chat(QUESTION) // a request may bring its own conversation
  const begin = new Label()
  const voter = await fork(VOTERS)

  const answer = lastNumber(await gen({ maxTokens: MAX_TOKENS, temperature: voter && 0.5 }))
  setVar(`answer ${voter}`, answer)
  if (voter > 0) return

  const answers = (await waitVars(...Array.from({ length: VOTERS }, (_, each) => `answer ${each}`))).map(String)
  const votes = (wanted) => answers.filter((each) => each === wanted).length
  const best = answers.reduce((a, b) => (votes(b) > votes(a) ? b : a))
  await begin.fixedAfter(`The answer is ${best}.`)
  setVar("votes", `${votes(best)} of ${VOTERS}`)
}

start(main)
