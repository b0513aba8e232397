// Runs the course's Python beside the page, so that a slow answer never blocks a slider.

import { startPanels } from "./live-python.js";
import { loadPyodide } from "./vendor/pyodide/pyodide.mjs";

const asset = (path) => new URL(`./vendor/${path}`, import.meta.url).href;

// Set before anything is awaited: a question that arrives while Python loads waits for it.
self.onmessage = async ({ data: { id, question } }) => {
  try {
    const answer = await panels;
    self.postMessage({ id, answer: JSON.parse(answer(JSON.stringify(question))) });
  } catch (error) {
    self.postMessage({ id, error: String(error.message ?? error) });
  }
};

const failed = (error) => self.postMessage({ failed: String(error?.message ?? error) });
// Pyodide never settles where its binary is missing; only this event tells.
self.onunhandledrejection = (event) => failed(event.reason);

const panels = startPanels(loadPyodide, fetchPackage(), { indexURL: asset("pyodide/") });
panels.catch(failed);

async function fetchPackage() {
  const response = await fetch(asset("parlab.zip"));
  if (!response.ok) throw new Error(`${response.url}: ${response.status}`);
  return response.arrayBuffer();
}
