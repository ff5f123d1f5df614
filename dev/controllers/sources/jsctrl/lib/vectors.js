// Control vectors: a script's scales go with its next answer. Probes: what the host has read with the last token.
let scales = {}
let readings = []

/** Set scales of control vectors that the request names, from the next token on. */
export function setControlVectors(changes) {
  for (const [name, scale] of Object.entries(changes)) {
    if (!Number.isFinite(scale)) throw new TypeError(`setControlVectors: got ${name}: ${scale}; scales are numbers`)
  }
  Object.assign(scales, changes)
}

/** The readings of the request's probes where the last token was drawn; none if it was forced. */
export const getProbes = () => readings.slice()

/** The callback `mid` with what this module adds to its argument and its answer. */
export const withVectors = (mid) => (text) => {
  readings = text.includes('"probes"') ? JSON.parse(text).probes : []
  const answer = mid(text)
  if (!Object.keys(scales).length) return answer
  const told = JSON.parse(answer)
  if (!told.branches?.length) return answer
  const control_vectors = scales
  scales = {}
  return JSON.stringify({ branches: told.branches.map((branch) => ({ ...branch, control_vectors })) })
}
