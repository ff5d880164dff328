// Live updates, keys, confirmations. No library, no build.
"use strict";
(() => {
  const base = document.body.dataset.base;
  const page = document.body.dataset.page;
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

  // -- live parts: change what has changed, leave the rest alone ----------------------------

  const keyOf = (node) => (node.nodeType === 1 && node.dataset ? node.dataset.key : undefined);

  function morph(old, fresh) {
    if (old.isEqualNode(fresh)) return;
    if (old.nodeType !== 1) {
      old.nodeValue = fresh.nodeValue;
      return;
    }
    for (const { name } of [...old.attributes]) {
      // What somebody has opened stays open.
      if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
    }
    for (const { name, value } of [...fresh.attributes]) {
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    morphChildren(old, fresh);
  }

  function morphChildren(old, fresh) {
    const keyed = new Map();
    for (const child of old.childNodes) {
      if (keyOf(child) !== undefined) keyed.set(keyOf(child), child);
    }
    let at = old.firstChild;
    for (const next of [...fresh.childNodes]) {
      const key = keyOf(next);
      let match = key === undefined ? at : keyed.get(key);
      if (key === undefined) {
        while (match && keyOf(match) !== undefined) match = match.nextSibling;
      }
      if (match && match.nodeName === next.nodeName && (key !== undefined || match === at)) {
        if (match !== at) old.insertBefore(match, at);
        else at = at.nextSibling;
        morph(match, next);
      } else {
        old.insertBefore(next, at);
      }
    }
    while (at) {
      const rest = at.nextSibling;
      old.removeChild(at);
      at = rest;
    }
  }

  function show(fragments) {
    for (const [name, html] of Object.entries(fragments)) {
      const place = document.getElementById(`live-${name}`);
      if (!place) continue;
      const fresh = document.createElement(place.nodeName);
      fresh.innerHTML = html;
      morphChildren(place, fresh);
    }
    markSelected();
  }

  let source = null;
  function listen() {
    if (!page || !document.getElementById("live-status")) return;
    const query = new URLSearchParams(location.search);
    const uuid = document.body.dataset.uuid;
    if (uuid) query.set("uuid", uuid);
    source = new EventSource(`${base}/live/${page}?${query}`);
    source.addEventListener("fragments", (event) => {
      document.body.classList.remove("stale");
      show(JSON.parse(event.data));
      document.dispatchEvent(new Event("umbel:tick"));
    });
    source.addEventListener("gone", () => source.close());
    source.onerror = () => {
      document.body.classList.add("stale");
      const words = $("#live-status .words");
      if (words) words.textContent = "no answer from the dashboard: trying again";
      if (source.readyState === EventSource.CLOSED) setTimeout(listen, 3000);
    };
  }
  // A page that nobody sees needs no updates.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      if (source) source.close();
      source = null;
    } else if (!source) listen();
  });
  window.addEventListener("pagehide", () => source && source.close());
  if (!document.hidden) listen();

  // -- rows by keyboard ---------------------------------------------------------------------

  let selected = null;
  const rows = () => $$("[data-href]");
  function markSelected() {
    for (const row of rows()) row.classList.toggle("selected", row.dataset.key === selected);
  }
  function move(step) {
    const all = rows();
    if (!all.length) return;
    const at = all.findIndex((row) => row.dataset.key === selected);
    const next = all[Math.min(all.length - 1, Math.max(0, at < 0 ? 0 : at + step))];
    selected = next.dataset.key;
    markSelected();
    next.scrollIntoView({ block: "nearest" });
  }
  function open() {
    const row = rows().find((one) => one.dataset.key === selected);
    if (row) location.href = row.dataset.href;
  }
  document.addEventListener("click", (event) => {
    const row = event.target.closest("[data-href]");
    if (!row || event.target.closest("a, button, input, summary")) return;
    if (String(getSelection())) return; // text was selected, nothing was meant to open
    location.href = row.dataset.href;
  });

  const help = $("#help");
  const pages = { c: "/", t: "/tasks", l: "/timeline", e: "/elections", q: "/queues", h: "/history" };
  let went = 0;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = ["INPUT", "TEXTAREA", "SELECT"].includes(event.target.nodeName);
    if (typing) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if ($("dialog[open]")) return;
    const key = event.key;
    if (performance.now() - went < 1000 && key in pages) {
      location.href = base + pages[key];
      return;
    }
    went = 0;
    if (key === "/") {
      const field = $("#search");
      event.preventDefault();
      if (field) {
        field.focus();
        field.select();
      } else location.href = `${base}/tasks?focus=1`;
    } else if (key === "?") help.showModal();
    else if (key === "j") move(1);
    else if (key === "k") move(-1);
    else if (key === "Enter" && !["A", "BUTTON"].includes(event.target.nodeName)) open();
    else if (key === "g") went = performance.now();
    else if (key === "d") switchTheme();
  });
  if (new URLSearchParams(location.search).has("focus") && $("#search")) $("#search").focus();
  $$("[data-opens]").forEach((button) =>
    button.addEventListener("click", () => document.getElementById(button.dataset.opens).showModal()),
  );
  document.addEventListener("click", (event) => {
    if (event.target.nodeName === "DIALOG") event.target.close(); // beside it
    if (event.target.closest("[data-close]")) {
      const dialog = event.target.closest("dialog");
      if (dialog) {
        event.preventDefault();
        dialog.close();
      }
    }
  });

  // -- colours ------------------------------------------------------------------------------

  function switchTheme() {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
    const next = now === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    localStorage.setItem("umbel-theme", next);
    document.dispatchEvent(new Event("umbel:theme"));
  }
  $("#theme").addEventListener("click", switchTheme);

  // -- confirmations: the preview in a dialog; without a script it is a page ------------------

  const confirmation = $("#confirm");
  document.addEventListener("click", async (event) => {
    const link = event.target.closest("a[data-confirm]");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    try {
      const answer = await fetch(link.href, { headers: { "X-Fragment": "1" } });
      if (!answer.ok) {
        const told = await answer.json();
        confirmation.replaceChildren(Object.assign(document.createElement("p"), { textContent: told.error }));
      } else confirmation.innerHTML = await answer.text();
      confirmation.showModal();
    } catch {
      location.href = link.href;
    }
  });

  // -- the search: chips add and remove words -------------------------------------------------

  $$("[data-word]").forEach((chip) =>
    chip.addEventListener("click", () => {
      const field = $("#search");
      const word = chip.dataset.word;
      const key = word.split(":")[0];
      const words = field.value.split(/\s+/).filter((one) => one && !one.startsWith(`${key}:`));
      if (!field.value.split(/\s+/).includes(word)) words.push(word);
      field.value = words.join(" ");
      field.form.submit();
    }),
  );
})();
