// A formula in TeX's notation as MathML, which browsers draw themselves.

import { useEffect, useRef } from "preact/hooks"
import temml from "temml"

/** Longer formulas, and those that are none, stay text. */
const MAX_FORMULA = 4000

export function Maths({ text, isBlock }: { text: string; isBlock: boolean }) {
  const place = useRef<HTMLSpanElement>(null)
  useEffect(() => {
    const element = place.current!
    try {
      if (text.length > MAX_FORMULA) throw new RangeError("long")
      temml.render(text, element, { displayMode: isBlock, throwOnError: true, trust: false, maxExpand: 200, maxSize: [20, 200] })
    } catch {
      element.textContent = text
    }
  }, [text, isBlock])
  return <span ref={place} class={isBlock ? "maths block" : "maths"} />
}
