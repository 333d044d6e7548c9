// Builds the page into the Python package, so that users need neither npm nor a network.
import { createHash } from "node:crypto";
import { copyFile, mkdir, readdir, readFile, stat, writeFile } from "node:fs/promises";
import { build } from "esbuild";

const out = new URL("../src/headwater/dashboard/assets/", import.meta.url);
const here = (name) => new URL(name, import.meta.url).pathname;
await mkdir(out, { recursive: true });

// One classic script and one style sheet: the export writes both into a single HTML file.
await build({
  entryPoints: [here("src/main.tsx")],
  outfile: new URL("app.js", out).pathname,
  bundle: true,
  minify: true,
  format: "iife",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none", // the licences of both libraries are in LICENSES.txt
});
await build({
  entryPoints: [here("src/styles.css")],
  outfile: new URL("app.css", out).pathname,
  bundle: true,
  minify: true,
  legalComments: "none",
});
await copyFile(here("index.html"), new URL("index.html", out));

const licences = [];
for (const name of ["preact", "uplot"]) {
  const { version } = JSON.parse(await readFile(here(`node_modules/${name}/package.json`), "utf8"));
  licences.push(`${name} ${version}\n\n${await readFile(here(`node_modules/${name}/LICENSE`), "utf8")}`);
}
await writeFile(new URL("LICENSES.txt", out), `The page contains these libraries.\n\n${licences.join("\n\n")}`);

// A test compares these with the files, so that nobody forgets to build, or changes what was built.
const digest = async (file) => createHash("sha256").update(await readFile(file)).digest("hex");
const names = (await readdir(here("src"), { recursive: true, withFileTypes: true })).filter((each) => each.isFile()).map((each) => `${each.parentPath}/${each.name}`.slice(here("./").length));
const sources = {};
for (const name of [...names, "build.mjs", "index.html", "package-lock.json"].sort()) sources[name] = await digest(here(name));
const built = {};
for (const name of ["LICENSES.txt", "app.css", "app.js", "index.html"]) built[name] = await digest(new URL(name, out));
await writeFile(here("built.json"), `${JSON.stringify({ sources, built }, null, 1)}\n`);

for (const name of ["app.js", "app.css", "index.html"]) {
  const { size } = await stat(new URL(name, out));
  console.log(`${name.padEnd(12)} ${(size / 1000).toFixed(1)} kB`);
}
