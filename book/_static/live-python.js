// Starts Python with the course's package and returns the function behind every live panel.
// The worker of the page and the tests in Node go through here.

export async function startPanels(loadPyodide, packageZip, options = {}) {
  const [python, zip] = await Promise.all([loadPyodide(options), packageZip]);
  python.unpackArchive(zip, "zip", { extractDir: "/course" });
  python.runPython("import sys; sys.path.insert(0, '/course')");
  return python.runPython("from parlab.panels import answer; answer");
}
