// Opens the page of `moeflux serve demo`, and of a model that reads pictures, in headless Chromium, uses it as a reader would, and takes pictures.
//
//   npm install
//   node check_page.mjs MOEFLUX [--chromium /usr/bin/chromium] [--pictures FOLDER] [--only CHECK]
//
// Fails on any error in the browser's console, on any request to another host, and if something does not work.

import { mkdirSync } from "node:fs";
import { chromium } from "playwright-core";
import { checks } from "./checks.mjs";
import { demo, open, seeing, serve } from "./server.mjs";

const [binary, ...rest] = process.argv.slice(2);
const option = (name, otherwise) => (rest.includes(name) ? rest[rest.indexOf(name) + 1] : otherwise);
const executablePath = option("--chromium", "/usr/bin/chromium");
const pictures = option("--pictures");
const only = option("--only");
if (pictures) mkdirSync(pictures, { recursive: true });

const servers = { demo: await serve(binary, demo), seeing: await serve(binary, seeing) };
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu"] });
try {
  for (const { name, screen, check, served = "demo" } of checks.filter(({ name }) => !only || name === only)) {
    const start = Date.now();
    const visit = await open(browser, servers[served].url, screen);
    const picture = async (of) => { if (pictures) await visit.page.screenshot({ path: `${pictures}/${of}.png` }); };
    try {
      await check(visit, picture, name);
    } catch (error) {
      await picture(`${name}-failed`);
      throw new Error(`${name}: ${error.message}\n${visit.errors.join("\n")}`, { cause: error });
    }
    if (visit.errors.length) throw new Error(`${name}: ${visit.errors.join("\n")}`);
    await visit.close();
    console.log(`${name}: ok, ${((Date.now() - start) / 1000).toFixed(1)} s`);
  }
} finally {
  await browser.close();
  for (const server of Object.values(servers)) server.stop();
}
