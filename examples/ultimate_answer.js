// A text with a hole: the script writes the words, the model fills in two digits and nothing else.
//
//     bridle run examples/ultimate_answer.js
//
// `gen` takes a regular expression; tokens that could not lead to a match are never drawn, whatever the model is.

async function main() {
  await $`Life, the universe and everything: 19 + 23 = `
  const answer = await gen({ regex: /\d\d/, storeVar: "answer" })
  console.log(`the model says ${answer}`)
}

start(main)
