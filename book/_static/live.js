// Brings the what-if panels of a page to life. Each one is a still picture and a sentence, which
// stay as they are without JavaScript; here they get sliders, whose moves Python answers in a
// worker that all panels share and that nothing starts before a reader comes near a panel.

(() => {
  const workerURL = new URL("live-worker.js", document.currentScript.src);
  const panels = [];
  let worker = null;
  let failure = "";
  let lastId = 0;
  const MOST_ANSWERS = 100; // per panel, of some 10 kB each; a large Gantt chart has 150 kB
  const PAUSE = 200; // ms: shorter than between two moves of different sliders
  const KEYS = ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"];

  class LivePanel {
    constructor(element) {
      this.element = element;
      this.picture = element.querySelector(".parlab-picture");
      this.sentence = element.querySelector(".parlab-sentence");
      this.sliders = JSON.parse(element.dataset.sliders);
      this.answers = new Map(); // by the positions of all sliders
      this.asked = 0; // id of the question in flight, 0 for none
      this.moved = false; // whether a slider moved since the last picture was asked for
      this.last = 0; // the slider that moved last
      this.movedAt = 0; // when it did, in ms
      this.addControls();
      this.shown = this.positions(); // those of the picture
      if (element.dataset.hint) this.pointer = new Pointer(this);
    }

    addControls() {
      const title = this.element.dataset.title;
      const group = make("div", "parlab-sliders", { role: "group", "aria-label": title });
      for (const [i, slider] of this.sliders.entries()) {
        const id = `parlab-slider-${++lastId}`;
        const label = make("label", "", { for: id }, slider.label);
        const range = { id, type: "range", min: 0, max: slider.count - 1, step: 1 };
        slider.input = make("input", "", range);
        slider.output = make("output", "", { for: id });
        slider.input.value = slider.index;
        slider.input.addEventListener("input", () => this.move(i));
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

    move(slider) {
      this.last = slider;
      this.movedAt = performance.now();
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
        this.show(known, this.positions());
      }
      if (this.asked) return;
      const where = this.moved ? undefined : this.pointer?.next();
      if (!this.moved && !where) return afterPaint(() => this.askAhead());
      this.moved = false;
      this.post(where ? this.shown : this.positions(), { where });
      if (!worker.ready) this.say("Starting Python in your browser, once for this page …");
    }

    // The next move is mostly a few positions along the same slider, or, after a pause, one along
    // another: have its picture ready.
    askAhead() {
      if (this.asked || this.moved || !worker.ready) return;
      const here = this.positions();
      const same = [1, -1, 2, -2, 3, -3].map((step) => [this.last, step]);
      const others = [1, -1].flatMap((step) => here.map((_, i) => [i, step]));
      const pause = this.movedAt + PAUSE - performance.now();
      for (const [i, step] of pause > 0 ? same : [...same, ...others]) {
        const there = here.with(i, here[i] + step);
        if (there[i] < 0 || there[i] > Number(this.sliders[i].input.max)) continue;
        if (!this.answers.has(String(there))) return this.post(there, { ahead: true });
      }
      clearTimeout(this.later);
      if (pause > 0) this.later = setTimeout(() => this.askAhead(), pause);
    }

    post(positions, { ahead = false, where } = {}) {
      this.asked = ++lastId;
      this.question = { positions, ahead, where };
      const indices = Object.fromEntries(this.sliders.map((s, i) => [s.name, positions[i]]));
      const { panel, constants } = this.element.dataset;
      const question = { panel, indices, constants: JSON.parse(constants), where };
      worker.postMessage({ id: this.asked, question });
    }

    answered({ answer, error }) {
      const { positions, ahead, where } = this.question;
      this.asked = 0;
      if (error) {
        if (!ahead) this.say(`This setting could not be computed: ${lastLine(error)}`);
        if (this.moved) this.ask();
        return;
      }
      if (where) {
        this.pointer.show(answer);
        this.say("");
        return this.ask();
      }
      if (this.answers.size >= MOST_ANSWERS) this.answers.delete(this.answers.keys().next().value);
      this.answers.set(String(positions), answer);
      if (!ahead) this.show(answer, positions);
      this.ask();
    }

    // Answers come one by one and in order, so an older one never replaces a newer one. During a
    // quick drag each is drawn although the slider has moved on; only its limits are out of date.
    show({ svg, sentence, counts }, positions) {
      this.pointer?.forget();
      redraw(this.picture, svg);
      this.shown = positions;
      this.sentence.textContent = sentence;
      this.say("");
      if (this.moved) return;
      for (const slider of this.sliders) {
        const max = String(counts[slider.name] - 1);
        if (slider.input.max !== max) slider.input.max = max; // moves a thumb that is beyond it
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

  // Names the part of a picture that a reader points at or steps to. Python finds it from its
  // numbers, so that a picture needs no element per part.
  class Pointer {
    constructor(panel) {
      const { title, hint } = panel.element.dataset;
      const id = `parlab-label-${++lastId}`;
      this.picture = panel.picture;
      this.hint = hint;
      this.label = make("p", "parlab-label", { id, "aria-live": "polite" }, hint);
      this.picture.after(this.label);
      this.picture.tabIndex = 0;
      this.picture.setAttribute("role", "application"); // lets a screen reader pass arrow keys on
      this.picture.setAttribute("aria-label", title);
      this.picture.setAttribute("aria-describedby", id);
      this.forget();
      const pointAt = (event) => {
        this.point = this.toPicture(event);
        this.keys = [];
        panel.ask();
      };
      this.picture.addEventListener("pointermove", pointAt);
      this.picture.addEventListener("pointerdown", pointAt);
      this.picture.addEventListener("pointerleave", ({ pointerType }) => {
        if (pointerType !== "touch") this.clear(); // a finger leaves with every tap
      });
      this.picture.addEventListener("blur", () => this.clear());
      this.picture.addEventListener("focus", startWorker);
      this.picture.addEventListener("keydown", (event) => {
        if (!KEYS.includes(event.key) || event.ctrlKey || event.metaKey || event.altKey) return;
        event.preventDefault();
        this.point = null;
        this.keys.push(event.key);
        panel.ask();
      });
    }

    toPicture({ clientX, clientY }) {
      const matrix = this.picture.querySelector("svg").getScreenCTM().inverse();
      const { x, y } = new DOMPoint(clientX, clientY).matrixTransform(matrix);
      return { x, y };
    }

    // What to ask next, undefined for nothing.
    next() {
      const { point, keys, at } = this;
      if (!point && !keys.length) return undefined;
      this.point = null;
      this.keys = [];
      this.waiting = true;
      return point ?? { at, keys };
    }

    show({ label, outline, trail, at }) {
      if (!this.waiting) return; // the reader has left, or the picture is another one
      this.at = at ?? this.at;
      this.mark({ trail, outline });
      this.say(label || this.hint);
    }

    clear() {
      this.point = null;
      this.keys = [];
      this.waiting = false;
      this.mark({});
      this.say(this.hint);
    }

    // In a new picture the keys start over.
    forget() {
      this.at = null;
      this.clear();
    }

    mark(paths) {
      const svg = this.picture.querySelector("svg");
      for (const old of svg.querySelectorAll(".parlab-mark")) old.remove();
      for (const [name, data] of Object.entries(paths)) {
        const path = document.createElementNS(svg.namespaceURI, "path");
        path.setAttribute("class", `parlab-mark parlab-${name}`);
        path.setAttribute("d", data);
        svg.append(path);
      }
    }

    say(words) {
      if (this.label.textContent !== words) this.label.textContent = words;
    }
  }

  // Replaces only what differs: the browser need not style, lay out and paint the rest again.
  function redraw(picture, svg) {
    const next = make("template");
    next.innerHTML = svg;
    renew(picture.querySelector("svg"), next.content.firstElementChild);
  }

  function renew(old, next) {
    if (old.isEqualNode(next)) return;
    if (old.nodeName !== next.nodeName) return old.replaceWith(next);
    if (next.nodeType === Node.TEXT_NODE) {
      old.data = next.data;
      return;
    }
    for (const { name } of [...old.attributes]) {
      if (!next.hasAttribute(name)) old.removeAttribute(name);
    }
    for (const { name, value } of next.attributes) {
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    const [before, after] = [[...old.childNodes], [...next.childNodes]];
    after.forEach((child, i) => (before[i] ? renew(before[i], child) : old.append(child)));
    for (const child of before.slice(after.length)) child.remove();
  }

  // The worker would take a processor from the threads that paint.
  function afterPaint(action) {
    requestAnimationFrame(() => setTimeout(action));
  }

  function speak(slider) {
    const position = slider.input.valueAsNumber;
    if (slider.said === position) return; // the same text anew would be laid out anew
    slider.said = position;
    slider.input.setAttribute("aria-valuetext", slider.spoken[position]);
    slider.output.textContent = slider.shown[position];
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
