// Builds the playground: checks the types, bundles, and writes the files that ship with the package, with a hash of the
// sources beside them. The same sources and the same lock file give the same bytes. `--check` compares and writes nothing.
import { execFileSync } from "node:child_process"
import { createHash } from "node:crypto"
import { existsSync, mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs"
import { join } from "node:path"
import { fileURLToPath } from "node:url"
import { build } from "esbuild"

const here = fileURLToPath(new URL(".", import.meta.url))
const out = join(here, "../bridle/http/playground/files")
const sha256 = data => createHash("sha256").update(data).digest("hex")

// tests/http/test_playground.py computes the same.
function hashOfSources() {
  const names = ["build.mjs", "icon.svg", "index.html", "package-lock.json", "package.json", "tsconfig.json"]
  names.push(...readdirSync(join(here, "src")).map(name => `src/${name}`))
  const lines = names.sort().map(name => `${sha256(readFileSync(join(here, name)))}  ${name}\n`)
  return sha256(lines.join(""))
}

// What the bundled packages ask to be kept beside them.
function licenses(inputs) {
  const names = new Set(inputs.flatMap(path => path.match(/node_modules\/((?:@[^/]+\/)?[^/]+)\//)?.[1] ?? []))
  return [...names].sort().map(name => {
    const folder = join(here, "node_modules", name)
    const { version, license } = JSON.parse(readFileSync(join(folder, "package.json")))
    const file = readdirSync(folder).find(each => /^licen[cs]e/i.test(each))
    return `${name} ${version} (${license})\n\n${file ? readFileSync(join(folder, file), "utf8").trim() : ""}\n`
  }).join(`\n${"-".repeat(72)}\n\n`)
}

// The library for PDFs can also sign them, with packages that are a third of its size. The page reads only their texts.
const unsigned = {
  name: "unsigned",
  setup(bundler) {
    bundler.onResolve({ filter: /^(?:pkijs|asn1js)$/ }, ({ path }) => ({ path, namespace: "unsigned" }))
    bundler.onLoad({ filter: /./, namespace: "unsigned" }, () => ({ contents: "exports.CryptoEngine = class {}" }))
  },
}

execFileSync(process.execPath, [join(here, "node_modules/typescript/bin/tsc"), "-p", here], { stdio: "inherit" })
const made = await build({
  absWorkingDir: here,
  entryPoints: { app: "src/main.tsx", pdf: "src/pdf.ts", style: "src/style.css" },
  external: ["./pdf.js"], // loaded when somebody needs it
  outdir: out,
  bundle: true,
  minify: true,
  write: false,
  format: "esm",
  target: "es2022",
  charset: "utf8",
  legalComments: "none",
  metafile: true,
  jsx: "automatic",
  jsxImportSource: "preact",
  plugins: [unsigned],
})
const files = Object.fromEntries(made.outputFiles.map(file => [file.path.split(/[\\/]/).pop(), Buffer.from(file.contents)]))
for (const name of ["icon.svg", "index.html"]) files[name] = readFileSync(join(here, name))
files["licenses.txt"] = Buffer.from(licenses(Object.keys(made.metafile.inputs)))
const hashes = Object.fromEntries(Object.keys(files).sort().map(name => [name, sha256(files[name])]))
files["manifest.json"] = Buffer.from(JSON.stringify({ sources: hashOfSources(), files: hashes }, null, 2) + "\n")

const differing = Object.keys(files).filter(
  name => !existsSync(join(out, name)) || !readFileSync(join(out, name)).equals(files[name]),
)
if (process.argv.includes("--check")) {
  console.log(differing.length ? `differs: ${differing.join(", ")}` : "the same bytes as shipped")
  process.exit(differing.length ? 1 : 0)
}
mkdirSync(out, { recursive: true })
for (const [name, data] of Object.entries(files)) {
  writeFileSync(join(out, name), data)
  console.log(`${name.padEnd(14)} ${String(data.length).padStart(8)} bytes`)
}
