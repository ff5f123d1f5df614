// Files that go with a message: images, sounds and videos as data URLs, texts, and the texts of PDFs.

import type { Model } from "./api"

export type Kind = "image" | "audio" | "video"

const KINDS: Kind[] = ["image", "audio", "video"]
const WORDS: Record<Kind, string> = { image: "image", audio: "sound", video: "video" }
const MAX_TEXT_KIB = 256
const MAX_PDF_MIB = 32
const MAX_MIB: Record<Kind, number> = { image: 8, audio: 16, video: 16 }

/** What a model reads beside text. */
export function kindsOf(model: Model | undefined): Kind[] {
  return KINDS.filter(kind => model?.input_modalities?.includes(kind))
}

/** "texts, PDFs, images and sounds": all models read texts. */
export function inWords(kinds: Kind[]): string {
  return ["texts", "PDFs", ...kinds.map(kind => `${WORDS[kind]}s`)].join(", ").replace(/, ([^,]*)$/, " and $1")
}

export const isPdf = (file: File) => file.type === "application/pdf" || /\.pdf$/i.test(file.name)

/** Whether a file is text, as far as its type or its name say so. */
export function isText(file: File): boolean {
  return /^text\/|json|xml|javascript|yaml|toml|x-sh|sql/.test(file.type) || (!file.type && /\.\w{1,5}$/.test(file.name) && !/\.(?:pdf|bin|gguf|zip|gz)$/i.test(file.name))
}

/** The text of a file. The error says in words why it cannot go with a message. */
export async function asText(file: File): Promise<string> {
  if (isPdf(file)) {
    if (file.size > MAX_PDF_MIB << 20) throw new Error(`${file.name} has ${(file.size / 2 ** 20).toFixed(1)} MiB; at most ${MAX_PDF_MIB} of a PDF are read.`)
    const { textOfPdf } = await import("./pdf.js")
    return textOfPdf(file.name, new Uint8Array(await file.arrayBuffer()), MAX_TEXT_KIB << 10)
  }
  if (file.size > MAX_TEXT_KIB << 10)
    throw new Error(`${file.name} has ${Math.ceil(file.size / 1024)} KiB; at most ${MAX_TEXT_KIB} of a text are taken.`)
  const text = await file.text()
  if (text.includes("\0")) throw new Error(`${file.name} is no text.`)
  return text
}

export function kindOf(url: string): Kind {
  return KINDS.find(kind => url.startsWith(`data:${kind}/`)) ?? "image"
}

/** "Picture 2" */
export function nameOf(url: string, number: number): string {
  const word = WORDS[kindOf(url)]
  return `${word[0].toUpperCase()}${word.slice(1)} ${number + 1}`
}

/** A part of a message, as servers take it. */
export function partOf(url: string): Record<string, unknown> {
  const type = `${kindOf(url)}_url`
  return { type, [type]: { url } }
}

/** A file as a data URL. The error says in words why it cannot go with a message to a model that reads `kinds`. */
export function asUrl(file: File, kinds: Kind[]): Promise<string> {
  const kind = KINDS.find(each => file.type.startsWith(`${each}/`))
  if (!kind || !kinds.includes(kind)) {
    const what = kind ? `${kind === "image" ? "an" : "a"} ${WORDS[kind]}` : "none of them"
    throw new Error(`The model reads ${inWords(kinds)}; ${file.name} is ${what}.`)
  }
  if (file.size > MAX_MIB[kind] << 20) {
    throw new Error(`${file.name} has ${(file.size / 2 ** 20).toFixed(1)} MiB; at most ${MAX_MIB[kind]} are taken.`)
  }
  return new Promise((resolve, reject) => {
    const reader = new FileReader()
    reader.onload = () => resolve(String(reader.result))
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`))
    reader.readAsDataURL(file)
  })
}

/** A file of a message, to be seen or heard. */
export function Shown({ url, number }: { url: string; number: number }) {
  const kind = kindOf(url), name = nameOf(url, number)
  if (kind === "audio") return <audio src={url} controls aria-label={name} />
  if (kind === "video") return <video src={url} controls aria-label={name} />
  return <img src={url} alt={name} />
}
