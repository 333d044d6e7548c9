// Builds the page into the Python package, so that users need neither npm nor a network.
import { copyFile, mkdir, readFile, stat, writeFile } from "node:fs/promises";
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

for (const name of ["app.js", "app.css", "index.html"]) {
  const { size } = await stat(new URL(name, out));
  console.log(`${name.padEnd(12)} ${(size / 1000).toFixed(1)} kB`);
}
