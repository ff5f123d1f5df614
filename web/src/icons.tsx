// Signs drawn as lines: fonts of some systems lack the characters for them.

const PATHS = {
  plus: "M12 5v14M5 12h14",
  key: "M7.5 11V8a4.5 4.5 0 0 1 9 0v3M6 11h12v9H6z",
  menu: "M4 7h16M4 12h16M4 17h16",
  sliders: "M4 8h9m4 0h3M4 16h3m4 0h9M15 5.5v5M9 13.5v5",
  auto: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
  light: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2.5v2M12 19.5v2M2.5 12h2M19.5 12h2M5.3 5.3l1.4 1.4M17.3 17.3l1.4 1.4M5.3 18.7l1.4-1.4M17.3 6.7l1.4-1.4",
  dark: "M19.5 14.5A8 8 0 0 1 9.5 4.5a8 8 0 1 0 10 10z",
  fork: "M7 4v16M7 14c0-5 10-3 10-10",
  clip: "M18 11l-6.5 6.5a4 4 0 0 1-5.7-5.7L13 4.7a2.7 2.7 0 0 1 3.800 3.800l-7 7a1.3 1.3 0 0 1-1.900-1.900L14 7.5",
}
export type IconName = keyof typeof PATHS

export function Icon({ name }: { name: IconName }) {
  return <svg class="icon-lines" viewBox="0 0 24 24" aria-hidden="true"><path d={PATHS[name]} /></svg>
}
