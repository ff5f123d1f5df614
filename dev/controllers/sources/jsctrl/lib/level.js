// How much the library prints by itself: 1 (the default) tells of each text and generation, 0 of nothing.
let level = 1

export const logLevel = () => level

export function setLogLevel(value) {
  level = value
}
