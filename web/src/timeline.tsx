// A time line of the steps of one output: a bar for each token, as high as its step took long. Drawn on a canvas, because
// ten thousand bars are many; the arrow keys walk along it as along the text.

import { useEffect, useRef } from "preact/hooks"
import type { Run } from "./runs"
import { theme } from "./settings"
import type { Line, Piece } from "./story"
import { looked, pinned } from "./tokens"

const HEIGHT = 56

function seconds(piece: Piece): number {
  const record = piece.record
  if (record?.type !== "token") return 0
  const cost = record.cost
  return cost ? cost.forward + cost.wait + cost.sample : 0
}

interface Bar { number: number; height: number; origin: string }

/** As many bars as there is room for, each the slowest of its share of the tokens. */
export function bars(pieces: Piece[], most: number): Bar[] {
  const share = Math.max(1, Math.ceil(pieces.length / Math.max(most, 1)))
  const made: Bar[] = []
  for (let from = 0; from < pieces.length; from += share) {
    let best = from
    for (let number = from; number < Math.min(from + share, pieces.length); number++)
      if (seconds(pieces[number]) > seconds(pieces[best])) best = number
    made.push({ number: best, height: seconds(pieces[best]), origin: pieces[best].origin })
  }
  return made
}

function draw(canvas: HTMLCanvasElement, line: Line): void {
  const width = canvas.clientWidth
  const ratio = devicePixelRatio || 1
  canvas.width = width * ratio
  canvas.height = HEIGHT * ratio
  const paint = canvas.getContext("2d")
  if (!paint || !width) return
  paint.scale(ratio, ratio)
  const style = getComputedStyle(canvas)
  const made = bars(line.pieces, Math.floor(width / 3))
  const times = made.map(bar => bar.height).sort((a, b) => a - b)
  const most = times[Math.floor(times.length * 0.98)] || times[times.length - 1] || 1e-3
  const step = Math.min(width / Math.max(made.length, 1), 14)
  made.forEach((bar, number) => {
    paint.fillStyle = style.getPropertyValue(`--bar-${bar.origin}`) || "#888"
    const height = Math.max(3, Math.min(bar.height / most, 1) * (HEIGHT - 6))
    paint.beginPath()
    paint.roundRect(number * step, HEIGHT - height, Math.max(step - 1, 1), height, Math.min(2, step / 3))
    paint.fill()
  })
}

export function Timeline({ run, line }: { run: Run; line: Line }) {
  const canvas = useRef<HTMLCanvasElement>(null)
  const version = run.version.value
  const colour = theme.value
  useEffect(() => {
    if (canvas.current) draw(canvas.current, line)
  }, [version, line, line.pieces.length, colour])
  useEffect(() => {
    const watcher = new ResizeObserver(() => canvas.current && draw(canvas.current, line))
    if (canvas.current) watcher.observe(canvas.current)
    return () => watcher.disconnect()
  }, [line])
  const count = line.pieces.length
  const now = looked.value?.line === line ? looked.value.number : 0
  const show = (number: number) => {
    const at = Math.min(Math.max(number, 0), count - 1)
    if (count) looked.value = pinned.value = { run, line, number: at, piece: line.pieces[at] }
  }
  const pointed = (event: PointerEvent) => {
    const made = bars(line.pieces, Math.floor(canvas.current!.clientWidth / 3))
    const step = Math.min(canvas.current!.clientWidth / Math.max(made.length, 1), 14)
    const bar = made[Math.min(Math.floor(event.offsetX / step), made.length - 1)]
    if (bar) show(bar.number)
  }
  const walk = (event: KeyboardEvent) => {
    const moves: Record<string, number> = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: count - 1 }
    if (!(event.key in moves)) return
    show(moves[event.key])
    event.preventDefault()
  }
  const total = line.pieces.reduce((sum, piece) => sum + seconds(piece), 0)
  return (
    <figure class="timeline">
      <canvas ref={canvas} height={HEIGHT} tabIndex={0} role="slider" aria-label="Time line of steps" aria-valuemin={0}
        aria-valuemax={Math.max(count - 1, 0)} aria-valuenow={now} onPointerDown={pointed} onKeyDown={walk}
        aria-valuetext={count ? `token ${now + 1} of ${count}, ${(seconds(line.pieces[Math.min(now, count - 1)]) * 1000).toFixed(1)} ms` : "nothing yet"} />
      <figcaption>
        {count.toLocaleString("en")} steps, {(total * 1000).toFixed(0)} ms of computing
        {line.waits.map((wait, number) => (
          <span key={number} class="wait"> · waited {((wait.seconds ?? 0) * 1000).toFixed(0)} ms
            {wait.variables?.length ? ` for ${wait.variables.join(", ")}` : wait.late ? " for a late controller" : ""}</span>
        )).slice(0, 6)}
      </figcaption>
    </figure>
  )
}
