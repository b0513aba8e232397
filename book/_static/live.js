// Brings the what-if panels of a page to life. Each one is a still picture and a sentence, which
// stay as they are without JavaScript; here they get sliders, whose moves Python answers in a
// worker that all panels share and that nothing starts before a reader comes near a panel.

(() => {
  const workerURL = new URL("live-worker.js", document.currentScript.src);
  const panels = [];
  let worker = null;
  let failure = "";
  let lastId = 0;
  const MOST_ANSWERS = 300; // per panel, of some 10 kB each

  class LivePanel {
    constructor(element) {
      this.element = element;
      this.picture = element.querySelector(".parlab-picture");
      this.sentence = element.querySelector(".parlab-sentence");
      this.sliders = JSON.parse(element.dataset.sliders);
      this.answers = new Map(); // by the positions of all sliders
      this.asked = 0; // id of the question in flight, 0 for none
      this.moved = false; // whether a slider moved since the last picture was asked for
      this.addControls();
    }

    addControls() {
      const title = this.element.dataset.title;
      const group = make("div", "parlab-sliders", { role: "group", "aria-label": title });
      for (const slider of this.sliders) {
        const id = `parlab-slider-${++lastId}`;
        const label = make("label", "", { for: id }, slider.label);
        const range = { id, type: "range", min: 0, max: slider.count - 1, step: 1 };
        slider.input = make("input", "", range);
        slider.output = make("output", "", { for: id });
        slider.input.value = slider.index;
        slider.input.addEventListener("input", () => this.move());
        slider.input.addEventListener("pointerdown", startWorker);
        slider.input.addEventListener("focus", startWorker);
        const row = make("div", "parlab-slider");
        row.append(label, slider.input, slider.output);
        group.append(row);
        speak(slider);
      }
      this.status = make("p", "parlab-status");
      this.element.prepend(group, this.status);
      this.sentence.setAttribute("aria-live", "polite");
    }

    move() {
      this.sliders.forEach(speak);
      this.moved = true;
      this.ask();
    }

    positions() {
      return this.sliders.map((slider) => slider.input.valueAsNumber);
    }

    // One question at a time: moves during an answer are asked as one, with the last positions.
    ask() {
      startWorker();
      if (failure) return this.say(failure);
      const known = this.answers.get(String(this.positions()));
      if (this.moved && known) {
        this.moved = false;
        this.show(known);
      }
      if (this.asked) return;
      if (!this.moved) return this.askAhead();
      this.moved = false;
      this.post(this.positions());
      if (!worker.ready) this.say("Starting Python in your browser, once for this page …");
    }

    // The next move is mostly a few positions along one slider: have its picture ready.
    askAhead() {
      if (this.asked || !worker.ready) return;
      const here = this.positions();
      for (const step of [1, -1, 2, -2, 3, -3]) {
        for (const [i, { input }] of this.sliders.entries()) {
          const there = here.with(i, here[i] + step);
          if (there[i] < 0 || there[i] > Number(input.max)) continue;
          if (!this.answers.has(String(there))) return this.post(there, true);
        }
      }
    }

    post(positions, ahead = false) {
      this.asked = ++lastId;
      this.question = { positions, ahead };
      const indices = Object.fromEntries(this.sliders.map((s, i) => [s.name, positions[i]]));
      const { panel, constants } = this.element.dataset;
      const question = { panel, indices, constants: JSON.parse(constants) };
      worker.postMessage({ id: this.asked, question });
    }

    answered({ answer, error }) {
      const { positions, ahead } = this.question;
      this.asked = 0;
      if (error) {
        if (!ahead) this.say(`This setting could not be computed: ${lastLine(error)}`);
        if (this.moved) this.ask();
        return;
      }
      if (this.answers.size >= MOST_ANSWERS) this.answers.clear();
      this.answers.set(String(positions), answer);
      if (!ahead) this.show(answer);
      this.ask();
    }

    // Answers come one by one and in order, so an older one never replaces a newer one. During a
    // quick drag each is drawn although the slider has moved on; only its limits are out of date.
    show({ svg, sentence, counts }) {
      this.picture.innerHTML = svg;
      this.sentence.textContent = sentence;
      this.say("");
      if (this.moved) return;
      for (const slider of this.sliders) {
        slider.input.max = counts[slider.name] - 1; // the browser moves a thumb that is beyond it
        slider.index = slider.input.valueAsNumber;
        speak(slider);
      }
    }

    // The sliders go back to what the picture shows.
    stop() {
      this.asked = 0;
      for (const slider of this.sliders) {
        slider.input.value = slider.index;
        slider.input.disabled = true;
        speak(slider);
      }
      this.status.setAttribute("role", "alert");
      this.say(failure);
    }

    say(message) {
      if (this.status.textContent !== message) this.status.textContent = message;
    }
  }

  function speak({ input, output, shown, spoken }) {
    input.setAttribute("aria-valuetext", spoken[input.valueAsNumber]);
    output.textContent = shown[input.valueAsNumber];
  }

  function make(tag, className, attributes = {}, text = "") {
    const element = document.createElement(tag);
    if (className) element.className = className;
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.textContent = text;
    return element;
  }

  const lastLine = (text) => text.trim().split("\n").pop();

  function startWorker() {
    if (worker || failure) return;
    if (location.protocol === "file:") {
      return fail("a browser runs them only on a page that comes from a server");
    }
    try {
      worker = new Worker(workerURL, { type: "module" });
    } catch (error) {
      return fail(lastLine(String(error)));
    }
    worker.ready = false;
    worker.onmessage = ({ data }) => {
      if (data.failed) return fail(lastLine(data.failed));
      worker.ready = true;
      panels.find((panel) => panel.asked === data.id)?.answered(data);
    };
    worker.onerror = (event) => {
      event.preventDefault();
      fail(event.message || "a file of theirs is missing or blocked");
    };
  }

  function fail(reason) {
    failure =
      `The sliders do not work here: ${reason}. The picture stays as it is. ` +
      "Reload the page, serve the book with “make serve”, or open it in Jupyter or Colab.";
    worker?.terminate();
    for (const panel of panels) panel.stop();
  }

  // Loading Python early hides most of its start, but 13 MB are not for readers who just pass by:
  // wait until they have scrolled and a panel is in view.
  function warmUpInView() {
    const observer = new IntersectionObserver((entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      observer.disconnect();
      startWorker();
    });
    for (const panel of panels) observer.observe(panel.element);
  }

  function begin() {
    for (const element of document.querySelectorAll(".parlab-panel")) {
      panels.push(new LivePanel(element));
    }
    if (panels.length && location.protocol !== "file:") {
      document.addEventListener("scroll", warmUpInView, { capture: true, once: true });
    }
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
  else begin();
})();
