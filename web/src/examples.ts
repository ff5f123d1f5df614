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

const DATE = `(January|February|March|April|May|June|July|August|September|October|November|December) [1-3]?[0-9], [12][0-9]{3}`

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
      { name: "A capital", expect: "One capitalized word, most often Paris, kept in a variable. The rest is fixed text.", text: `// Fixed text costs no step of the model; what follows must match.
await $\`The capital of France is\`
const city = await gen({ regex: / [A-Z][a-z]+/, storeVar: "city" })
await $\`, a city.\`
console.log(\`the model says\${city}\`)
` },
      { name: "Forks that ask", text: `// Three forks go on by themselves, each with a variable of its own.
const animals = ["cat", "dog", "bird"]
await $\`Once upon a time there was a \`
const number = await fork(3)
await $\`\${animals[number]} that\`
await gen({ regex: / [a-z ,]{20,80}\\./, maxTokens: 24, storeVar: animals[number], temperature: 0.5 })
`, expect: "A tree of three forks. Each continues with another animal and keeps its sentence in a variable of that name." },
      { name: "Taking back", text: `import { Label } from "aici"

// Writes three times, and keeps the longest try.
await $\`Once upon a time there was\`
const start = new Label()
let best = ""
for (let round = 0; round < 3; round++) {
  const text = await gen({ regex: / [a-z ,]{10,60}\\./, maxTokens: 16, temperature: 0.7 })
  console.log(\`try \${round + 1}: \${text}\`)
  if (text.length > best.length) best = text
  await start.rewind()
}
await $\`\${best}\`
`, expect: "Three tries are written and rolled back, struck through. The longest one is forced in the end. The log has all three." },
      { name: "A list", text: `// A chosen animal leaves the list, so that none comes twice.
const left = [" cat", " dog", " horse", " owl", " whale"]
await $\`Three animals:\\n\`
for (let n = 1; n <= 3; n++) {
  await $\`\${n}.\`
  const chosen = await gen({ options: left, storeVar: \`animal\${n}\` })
  left.splice(left.indexOf(chosen), 1)
  await $\`\\n\`
}
`, expect: "Three lines with one animal each, no two the same. The numbers cost no step of the model." },
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
`, expect: "The answer is Yes or No, and nothing else. The log repeats it." },
      { name: "Forks", text: `import pyaici.server as aici


async def main():
    await aici.FixedTokens("A number: ")
    number = await aici.fork(3)
    text = await aici.gen_text(regex="[0-9]{%d}" % (number + 1), store_var=f"number{number}")
    print("fork", number, "wrote", text)


aici.start(main())
`, expect: "A tree of three forks with numbers of one, two and three digits." },
    ],
  },
  {
    id: "program", name: "JSON program", controller: "declctrl", prompt: "",
    examples: [
      { name: "A word, used again", text: `{
  "steps": [
    {"Fixed": {"text": {"String": {"str": "The capital of France is"}}}},
    {"Gen": {"rx": " [A-Z][a-z]+", "stmts": [{"Set": {"var": "city", "expr": {"Current": {}}}}]}},
    {"Fixed": {"text": {"Concat": {"parts": [
      {"String": {"str": ", so"}}, {"Var": {"var": "city"}}, {"String": {"str": " is in France."}}
    ]}}}}
  ]
}
`, expect: "The first city is the model's, most often Paris. The program forces the same word again, in blue." },
      { name: "A choice", text: `{
  "steps": [
    {"Fixed": {"text": {"String": {"str": "The color of grass is"}}}},
    {"Choose": {"options": {"Concat": {"list": true, "parts": [
      {"String": {"str": " green"}}, {"String": {"str": " blue"}}, {"String": {"str": " black"}}
    ]}}}},
    {"Fixed": {"text": {"String": {"str": "."}}}}
  ]
}
`, expect: "One of the three endings, the one that the model finds likeliest from token to token." },
    ],
  },
  {
    id: "regex", name: "Regex", controller: null, prompt: "Once upon",
    examples: [
      { name: "A date", text: DATE, prompt: "What is the date of Christmas in 2024?",
        expect: "December 25, 2024, or another date, and nothing else: each token had to fit the pattern. The twin writes sentences." },
      { name: "One sentence", text: "The [A-Za-z ]{10,50}[.]", prompt: "What is the capital of France?",
        expect: "One short sentence, most often “The capital of France is Paris.” The twin may add more of them." },
      { name: "A telephone number", text: "[0-9]{3}-[0-9]{4}", prompt: "Invent a telephone number.",
        expect: "Three digits, a hyphen, four digits. The twin writes sentences, or a number of another form." },
      { name: "Words without an e", text: "[A-DF-Z][a-df-z]{0,9}( [a-df-z]{1,9}){3,9}[.]", prompt: "Describe a sunny day.",
        expect: "A short sentence without the letter e. Yellow tokens are where the model wanted a word with one." },
    ],
  },
  {
    id: "schema", name: "JSON schema", controller: null, prompt: "Invent a person, as JSON.",
    examples: [
      { name: "A person", text: SCHEMA, prompt: "Invent a person, as JSON.",
        expect: "The answer is JSON with these three fields; age is below 100 and color is one of three. The twin may write prose, or other fields." },
      { name: "A list of numbers", text: `{ "type": "array", "items": { "type": "integer" }, "minItems": 3, "maxItems": 5 }\n`, prompt: "List the first five prime numbers.",
        expect: "A JSON list of three to five whole numbers. The twin writes a sentence or a list with explanations." },
    ],
  },
  {
    id: "lark", name: "Lark", controller: null, prompt: "A sum: ",
    examples: [
      { name: "Sums", text: `start: term ("+" term){1,3}
term: NUMBER | "(" start ")"
NUMBER: /[1-9][0-9]?/
`, prompt: "Write a sum of small numbers.",
        expect: "Two to four numbers below 100 with plus signs, maybe in brackets that all close." },
      { name: "Greetings", text: `start: greeting ", " NAME "!"
greeting: "Hello" | "Good day" | "Welcome"
NAME: /[A-Z][a-z]{2,8}/
`, prompt: "Greet Anna.",
        expect: "One of three greetings, a comma, a name and an exclamation mark. The twin greets as it likes." },
    ],
  },
]
