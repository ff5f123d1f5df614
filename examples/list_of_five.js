// A list with exactly five items: numbers and line breaks are the script's, the words the model's.
//
//     bridle run examples/list_of_five.js
//
// Each item is one word and ends with its line. What came out is an array to go on with.

async function main() {
  await $`List five fruits. Use numbers.\n`
  const items = []
  for (let number = 1; number <= 5; number++) {
    await $`${number}.`
    const line = await gen({ regex: / [a-z]+\n/, maxTokens: 12 })
    items.push(line.trim())
  }
  console.log("JSON-OUT:", JSON.stringify(items))
}

start(main)
