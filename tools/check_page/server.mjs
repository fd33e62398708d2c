// The server under test, and a browser's view of its page.

import { spawn } from "node:child_process";
import { fileURLToPath } from "node:url";

/// Less memory than all experts need, so that the disk shows too.
export const demo = ["demo", "--memory", "30MiB", "--sequences", "2"];

/// A tiny random model that reads pictures.
export const fixtures = fileURLToPath(new URL("../../crates/engine/tests/fixtures/pictures", import.meta.url));
export const seeing = [`${fixtures}/qwen3_vl_moe`, "--image-pixels", "65536"];

export async function serve(binary, model) {
  const server = spawn(binary, ["serve", ...model, "--port", "0", "--context", "1024"]);
  const url = await new Promise((resolve, reject) => {
    let said = "";
    server.stderr.on("data", (data) => {
      said += data;
      const found = /on (http:\/\/\S+)/.exec(said);
      if (found) resolve(found[1]);
    });
    server.on("error", reject);
    server.on("exit", () => reject(new Error(`the server did not start: ${said}`)));
  });
  return { url, stop: () => server.kill() };
}

/// A page of its own browser context, with all that its console says and all that it asks of others.
export async function open(browser, url, { width = 1280, height = 720, scheme = "light", phone = false } = {}) {
  const context = await browser.newContext({
    viewport: { width, height }, screen: { width, height }, colorScheme: scheme, hasTouch: phone, isMobile: phone, reducedMotion: "reduce",
    acceptDownloads: true,
  });
  const page = await context.newPage();
  const errors = [];
  page.on("console", (message) => {
    // A browser tells of every refused request by itself.
    const refused = message.text().startsWith("Failed to load resource");
    if (["error", "warning"].includes(message.type()) && !refused) errors.push(message.text());
  });
  page.on("pageerror", (error) => errors.push(String(error)));
  page.on("request", (request) => {
    const own = /^(data|blob):/.test(request.url()) || request.url().startsWith(url);
    if (!own) errors.push(`asks ${request.url()}`);
  });
  await page.goto(url);
  return new Visit(page, context, errors);
}

class Visit {
  constructor(page, context, errors) {
    Object.assign(this, { page, context, errors });
    this.last = page.locator(".message.assistant").last();
  }

  async say(text) {
    await this.page.locator("#input").fill(text);
    await this.page.keyboard.press("Enter");
  }

  ended() {
    return this.page.locator("#send").waitFor({ state: "visible", timeout: 120_000 });
  }

  async setting(id, value) {
    await this.page.locator("#show-settings").click();
    await this.page.locator(`#${id}`).fill(value);
    await this.page.locator("#settings button").click();
  }

  messages() {
    return this.page.locator(".message").count();
  }

  /// Answers the next requests in the server's place: with a text in events, cut off or whole, or with an error.
  async answer({ text = "", cut = false, status = 200, error }) {
    const event = (choice) => `data: ${JSON.stringify({ choices: [{ index: 0, ...choice }] })}\n\n`;
    const events = event({ delta: { content: text }, finish_reason: null })
      + (cut ? "" : event({ delta: {}, finish_reason: "stop" }) + "data: [DONE]\n\n");
    const body = error ? JSON.stringify({ error: { message: error } }) : events;
    const contentType = error ? "application/json" : "text/event-stream";
    await this.page.unroute("**/v1/chat/completions");
    await this.page.route("**/v1/chat/completions", (route) => route.fulfill({ status, contentType, body }));
  }

  /// Lets the server answer again.
  async asked() {
    await this.page.unroute("**/v1/chat/completions");
  }

  async close() {
    await this.context.close();
  }
}
