// Parallel judging: forks of one text judge a claim, each in its own words, and agree on a verdict.
//
//     bridle run examples/judges.js
//
// The common text is computed once; what follows runs side by side in one batch. Each judge asks its question, looks at
// how likely the model finds Yes and No, and leaves its opinion in a variable that all of them see. The first one waits
// for the others and writes the verdict; the others end.
import { candidates, Label, setVar } from "aici"

const ANIMAL = "dog"
const QUESTIONS = [`Is a ${ANIMAL} a mammal?`, `Is a ${ANIMAL} an animal?`, `Is a ${ANIMAL} a bird?`]
const EXPECTED = ["Yes", "Yes", "No"]

/** How likely the model finds an answer: one look at the next token, nothing is appended. */
async function opinion(answer) {
  const found = await candidates(2, { options: [" Yes", " No"] })
  const likely = found.find(({ text }) => text.trim() && ` ${answer}`.startsWith(text))
  return likely ? Math.exp(likely.logprob) : 0
}

async function main() {
  await $`A few questions about animals.\n`
  const begin = new Label()
  const judge = await fork(QUESTIONS.length)

  await $`Q: ${QUESTIONS[judge]}\nA:`
  setVar(`opinion ${judge}`, (await opinion(EXPECTED[judge])).toFixed(3))
  await gen({ options: [" Yes", " No"] })
  if (judge > 0) return

  const opinions = await waitVars(...QUESTIONS.map((_, number) => `opinion ${number}`))
  const mean = opinions.map(Number).reduce((a, b) => a + b) / opinions.length
  const verdict = mean > 0.5 ? "a mammal" : "no mammal"
  await begin.fixedAfter(`The judges agree (${mean.toFixed(2)}): a ${ANIMAL} is ${verdict}.`)
  setVar("verdict", verdict)
}

start(main)
