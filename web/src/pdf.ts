// The text of a PDF, page by page. A file of its own, which the page loads when somebody attaches the first PDF.

import { PDF, type PDFPage } from "@libpdf/core"
import { Turns } from "./turns"

const MAX_PAGES = 1000
const LIGATURES = /[\uFB00-\uFB06]/g

async function pagesOf(name: string, data: Uint8Array): Promise<PDFPage[]> {
  const pdf = await PDF.load(data).catch(error => error as Error)
  const isLocked = pdf instanceof PDF ? pdf.isEncrypted && !pdf.isAuthenticated : new TextDecoder("latin1").decode(data).includes("/Encrypt")
  if (isLocked) throw new Error(`${name} is protected by a password. Attach a copy without one.`)
  if (pdf instanceof Error) throw new Error(`${name} cannot be read as a PDF: ${pdf.message}`)
  return pdf.getPages()
}

/** The text of a PDF. Throws, in words, where there is none or more than `maxChars` characters of it. */
export async function textOfPdf(name: string, data: Uint8Array, maxChars: number): Promise<string> {
  const pages = await pagesOf(name, data)
  if (pages.length > MAX_PAGES) throw new Error(`${name} has ${pages.length} pages; at most ${MAX_PAGES} are read.`)
  const texts: string[] = []
  let numChars = 0
  const turns = new Turns()
  for (const [number, page] of pages.entries()) {
    const text = page.extractText().text.trim().replace(LIGATURES, each => each.normalize("NFKC")).replace(/\n(?:\s*\n){2,}/g, "\n\n")
    if (text) texts.push(pages.length > 1 ? `[Page ${number + 1}]\n${text}` : text)
    if ((numChars += text.length) > maxChars)
      throw new Error(`${name} has more than ${maxChars.toLocaleString("en")} characters of text by page ${number + 1}. Attach fewer pages.`)
    if (turns.isOver) await turns.next()
  }
  if (!texts.length) throw new Error(`${name} has no text: its pages are images. A model that reads images takes them as screenshots.`)
  return texts.join("\n\n")
}
