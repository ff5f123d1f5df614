// Programs to begin with, one list for each language.

/** `expect` says what to look for: what the rule does, and what the twin without it does. */
export interface Example { name: string; text: string; prompt?: string; expect?: string }
export interface Language {
  id: string; name: string; controller: string | null; prompt: string; examples: Example[]
}

const SCHEMA = `{
  "type": "object",
  "properties": {
    "name": { "type": "string" },
    "age": { "type": "integer", "minimum": 1, "maximum": 99 },
    "color": { "enum": ["red", "green", "blue"] }
  },
  "required": ["name", "age", "color"]
}
`

export const LANGUAGES: Language[] = [
  {
    id: "javascript", name: "JavaScript", controller: "jsctrl", prompt: "",
    examples: [
      { name: "Yes or no, and why", prompt: "Is the sun a planet?", text: `// One of two words; then a reason of one sentence.
const answer = await gen({ options: ["Yes", "No"], storeVar: "answer" })
await $\`, because \`
await gen({ regex: /[^.\\n]{10,120}[.]/, maxTokens: 40 })
console.log(\`the model says \${answer}\`)
`, expect: "The answer begins with Yes or No and is one sentence. The comma and “because” cost no step of the model. The twin explains as long as it likes." },
      { name: "A sum", expect: "The answer is a number alone, kept in a variable.", text: `// Fixed text costs no step of the model; what follows must match.
await $\`19 + 23 = \`
const answer = await gen({ regex: /[0-9]+/, storeVar: "sum" })
console.log(\`the model says \${answer}\`)
` },
      { name: "Forks that ask", text: `// Three forks go on by themselves, each with a variable of its own.
const animals = ["cat", "dog", "bird"]
await $\`Once upon a time there was a \`
const number = await fork(3)
await $\`\${animals[number]}\`
await gen({ regex: /[a-z ,]+\\./, maxTokens: 24, storeVar: animals[number], temperature: 0.8 })
` },
      { name: "Taking back", text: `import { Label } from "aici"

// Writes three times, and keeps the longest try.
await $\`Once upon a time there was \`
const start = new Label()
let best = ""
for (let round = 0; round < 3; round++) {
  const text = await gen({ regex: /[a-z ]+\\./, maxTokens: 16, temperature: 1.2 })
  console.log(\`try \${round + 1}: \${text}\`)
  if (text.length > best.length) best = text
  await start.rewind()
}
await $\`\${best}\`
` },
      { name: "A list", text: `await $\`Three animals:\\n\`
for (let n = 1; n <= 3; n++) {
  await $\`\${n}. \`
  await gen({ regex: /[a-z]+/, maxTokens: 6, storeVar: \`animal\${n}\` })
  await $\`\\n\`
}
` },
    ],
  },
  {
    id: "python", name: "Python", controller: "pyctrl", prompt: "",
    examples: [
      { name: "Yes or no", text: `import pyaici.server as aici


async def main():
    await aici.FixedTokens("Q: Is Paris the capital of France?\\nA:")
    answer = await aici.gen_text(options=[" Yes", " No"], store_var="answer")
    print("the model says", answer)


aici.start(main())
` },
      { name: "Forks", text: `import pyaici.server as aici


async def main():
    await aici.FixedTokens("A number: ")
    number = await aici.fork(3)
    text = await aici.gen_text(regex="[0-9]{%d}" % (number + 1), store_var=f"number{number}")
    print("fork", number, "wrote", text)


aici.start(main())
` },
    ],
  },
  {
    id: "program", name: "JSON program", controller: "declctrl", prompt: "",
    examples: [
      { name: "A sum, used again", text: `{
  "steps": [
    {"Fixed": {"text": {"String": {"str": "12 + 13 = "}}}},
    {"Gen": {"rx": "[0-9]+", "stmts": [{"Set": {"var": "sum", "expr": {"Current": {}}}}]}},
    {"Fixed": {"text": {"Concat": {"parts": [
      {"String": {"str": ", so half of it is not "}}, {"Var": {"var": "sum"}}
    ]}}}}
  ]
}
` },
      { name: "A choice", text: `{
  "steps": [
    {"Fixed": {"text": {"String": {"str": "The sky is"}}}},
    {"Choose": {"options": {"Concat": {"list": true, "parts": [
      {"String": {"str": " blue"}}, {"String": {"str": " green"}}, {"String": {"str": " a lie"}}
    ]}}}},
    {"Fixed": {"text": {"String": {"str": "."}}}}
  ]
}
` },
    ],
  },
  {
    id: "regex", name: "Regex", controller: null, prompt: "Once upon",
    examples: [
      { name: "A date", text: "[A-Z][a-z]{2,8} [0-9]{1,2}, [0-9]{4}", prompt: "When did people first walk on the Moon?",
        expect: "The answer is a date and nothing else: each token had to fit the pattern. The twin writes sentences." },
      { name: "Lower case", text: "[a-z ]+[.]", prompt: "Once upon" },
      { name: "A telephone number", text: "[0-9]{3}-[0-9]{4}", prompt: "Call me: " },
      { name: "Words without an e", text: "( [a-df-z]+){4,8}[.]", prompt: "Once upon a time there was" },
    ],
  },
  {
    id: "schema", name: "JSON schema", controller: null, prompt: "Invent a person, as JSON.",
    examples: [
      { name: "A person", text: SCHEMA, prompt: "Invent a person, as JSON.",
        expect: "The answer is JSON with these three fields; age is below 100 and color is one of three. The twin may write prose, or other fields." },
      { name: "A list of numbers", text: `{ "type": "array", "items": { "type": "integer" }, "minItems": 3, "maxItems": 5 }\n`, prompt: "Numbers: " },
    ],
  },
  {
    id: "lark", name: "Lark", controller: null, prompt: "A sum: ",
    examples: [
      { name: "Sums", text: `start: term ("+" term){1,3}
term: NUMBER | "(" start ")"
NUMBER: /[1-9][0-9]?/
`, prompt: "A sum: " },
      { name: "Greetings", text: `start: greeting ", " NAME "!"
greeting: "Hello" | "Good day" | "Welcome"
NAME: /[A-Z][a-z]{2,8}/
`, prompt: "He said: " },
    ],
  },
]
