"use strict";
// The table of rollout groups: filters, sorting, lazy rows, and completions with coloured tokens. The state of the filters lives
// in the URL hash (#step=train:3&q=...&spread=zero&trunc=only&failed=only&min=0.5&sort=mean&dir=desc&color=ratio&open=1), so a
// view can be linked to.

const CHUNK = 60;               // rows added to the page at a time
const RATIO_SATURATES = 0.2;    // |ln ratio| at full colour: the usual clip range
const DEFAULTS = { step: "train", q: "", spread: "", trunc: "", failed: "", min: "", sort: "step", dir: "desc", color: "advantage", open: "" };

function groupsTable(box, allGroups) {
  const groups = allGroups.map((group) => {
    const lengths = group.completions.map((item) => item.length || 0);
    return { ...group,
      lenMean: lengths.reduce((a, b) => a + b, 0) / Math.max(lengths.length, 1), lenMax: Math.max(...lengths, 0),
      truncated: group.completions.filter((item) => item.finish === "length").length,
      failed: group.completions.filter((item) => item.failure !== null && item.failure !== undefined).length,
      where: (group.held_out ? "val:" : "train:") + group.step,
      haystack: [group.prompt, group.reference || "", ...group.completions.map((item) => item.text)].join("\n").toLowerCase() };
  });
  const rewards = groups.flatMap((group) => group.completions.map((item) => Math.abs(item.reward))).filter(isNumber);
  const rewardTop = rewards.reduce((a, b) => Math.max(a, b), 0) || 1;
  const state = { ...DEFAULTS, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1)).entries()) };
  const details = new Map();    // file -> parsed token data, on first use
  const open = new Set(), openNodes = new Map();
  let found = [], rendered = 0;

  const tokensOf = (group) => {
    if (!details.has(group.file)) details.set(group.file, JSON.parse(document.getElementById("samples-" + group.file).textContent));
    return details.get(group.file)[group.index];
  };

  // ------------------------------------------------------------------------------------------------------------- filters
  const numbers = (heldOut) => [...new Set(groups.filter((group) => group.held_out === heldOut).map((group) => group.step))].sort((a, b) => a - b);
  const select = (key, title, options) => {
    const node = h("select", { title, "aria-label": title, onchange: () => { state[key] = node.value; update(); } },
      options.map(([value, text]) => Array.isArray(text) ? h("optgroup", { label: value }, text.map(([v, t]) => h("option", { value: v }, t))) : h("option", { value }, text)));
    node.value = state[key];
    if (node.selectedIndex < 0) { node.selectedIndex = 0; state[key] = node.value; }
    return node;
  };
  const train = numbers(false), held = numbers(true);
  const stepOptions = [["all", "All rollouts"]];
  if (train.length) stepOptions.push(["Training", [["train", "All training steps"], ...train.map((n) => ["train:" + n, `Step ${n}`])]]);
  if (held.length) stepOptions.push(["Held-out", [["val", "All evaluations"], ...held.map((n) => ["val:" + n, `At model step ${n}`])]]);
  const search = h("input", { type: "search", placeholder: "Search text", "aria-label": "Search prompts and completions", oninput: () => { state.q = search.value; later(); } });
  const minimum = h("input", { type: "number", step: "any", placeholder: "Min reward", "aria-label": "Minimum mean reward", title: "Minimum mean reward", oninput: () => { state.min = minimum.value; later(); } });
  search.value = state.q; minimum.value = state.min;
  const controls = { step: select("step", "Step", stepOptions),
    spread: select("spread", "Reward spread", [["", "Any spread"], ["zero", "Zero spread only"], ["hide", "Hide zero spread"]]),
    trunc: select("trunc", "Truncation", [["", "Any ending"], ["only", "Truncated only"], ["hide", "Hide truncated"]]),
    failed: select("failed", "Failed rewards", [["", "Any reward"], ["only", "Failed rewards only"], ["hide", "Hide failed"]]) };
  const count = h("span", { class: "count", "aria-live": "polite" });
  const reset = h("button", { class: "plain", type: "button", onclick: () => {
    Object.assign(state, DEFAULTS, { color: state.color, sort: state.sort, dir: state.dir });
    search.value = minimum.value = "";
    for (const [key, node] of Object.entries(controls)) node.value = state[key];
    if (controls.step.selectedIndex < 0) controls.step.value = state.step = "all";
    update();
  } }, "Reset");

  // ------------------------------------------------------------------------------------------------------------ colouring
  const scale = h("span", { class: "scale" });
  const modes = h("span", { class: "seg", role: "group", "aria-label": "Colour tokens by" }, [["advantage", "Advantage"], ["ratio", "Probability ratio"], ["probability", "Surprise"]].map(([value, text]) =>
    h("button", { type: "button", "data-mode": value, onclick: () => { state.color = value; remember(); recolour(); } }, text)));
  const colourOf = (group, completion, data, i) => {
    if (state.color === "advantage") {
      const top = Math.max(...group.completions.map((item) => Math.abs(item.advantage || 0)));
      return top > 0 && isNumber(completion.advantage) ? tint(completion.advantage / top) : "";
    }
    if (state.color === "ratio") return data.p && isNumber(data.p[i]) && isNumber(data.s[i]) ? tint((data.p[i] - data.s[i]) / RATIO_SATURATES) : "";
    return data.s && isNumber(data.s[i]) ? `rgb(var(--rare) / ${(0.6 * (1 - Math.exp(data.s[i]))).toFixed(3)})` : "";
  };
  const tint = (x) => Math.abs(x) < 0.004 ? "" : `rgb(var(${x > 0 ? "--pos" : "--neg"}) / ${(0.06 + 0.42 * Math.min(Math.abs(x), 1)).toFixed(3)})`;
  function recolour() {
    for (const button of modes.children) button.setAttribute("aria-pressed", String(button.dataset.mode === state.color));
    const diverging = "linear-gradient(90deg, rgb(var(--neg) / 48%), transparent 50%, rgb(var(--pos) / 48%))";
    const [low, high, gradient] = { advantage: ["below group", "above group", diverging],
      ratio: [`× ${fmt(Math.exp(-RATIO_SATURATES))}`, `× ${fmt(Math.exp(RATIO_SATURATES))}`, diverging],
      probability: ["expected", "surprising", "linear-gradient(90deg, transparent, rgb(var(--rare) / 60%))"] }[state.color];
    scale.replaceChildren(low, h("i", { style: `background:${gradient}` }), high);
    for (const paint of openNodes.values()) paint();
  }
  if (!["advantage", "ratio", "probability"].includes(state.color)) state.color = "advantage";

  // ----------------------------------------------------------------------------------------------------------------- rows
  const columns = [["step", "Step", ""], ["prompt", "Prompt", ""], ["", "Rewards", "pips"], ["mean", "Mean", "num"], ["spread", "Spread", "num spread"], ["lenMax", "Tokens", "num len"]];
  const head = h("div", { class: "thead" }, columns.map(([key, text, cls]) => key
    ? h("button", { type: "button", class: cls, "data-key": key, title: key === "lenMax" ? "Mean / longest completion" : null, onclick: () => {
      state.dir = state.sort === key ? (state.dir === "asc" ? "desc" : "asc") : (key === "step" || key === "prompt" ? "asc" : "desc");
      state.sort = key; update();
    } }, text) : h("span", { class: cls, title: "One mark per completion: stronger is a larger reward, an underline is a truncated one" }, text)));
  const body = h("div", {}), sentinel = h("div", { style: "height:1px" });
  const rows = h("div", { class: "rows" }, head, body, sentinel);
  new IntersectionObserver((entries) => { if (entries.some((entry) => entry.isIntersecting)) more(); }, { root: rows, rootMargin: "600px" }).observe(sentinel);
  box.replaceChildren(
    h("div", { class: "bar" }, controls.step, search, controls.spread, controls.trunc, controls.failed, minimum, reset),
    h("div", { class: "bar bar2" }, "Colour tokens by", modes, scale, count), rows);

  function pip(item) {
    const cls = [item.reward < 0 ? "neg" : "", item.finish === "length" ? "cut" : "", item.failure ? "failed" : ""].join(" ").trim();
    return h("i", { class: cls || null, style: `--a:${(0.05 + 0.95 * Math.min(Math.abs(item.reward || 0) / rewardTop, 1)).toFixed(2)}` });
  }
  function rowOf(group) {
    const node = h("div", { class: "row" });
    const button = h("button", { type: "button", class: "row-head", "aria-expanded": "false", onclick: () => toggle() },
      h("span", { class: "muted" }, group.held_out ? [h("span", { class: "tag held", style: "margin:0 6px 0 0" }, "held-out"), group.step] : group.step),
      h("span", { class: "prompt" }, group.prompt.replace(/\s+/g, " ").trim() || "(empty prompt)",
        group.failed ? h("span", { class: "tag bad" }, `${group.failed} failed`) : null, group.truncated ? h("span", { class: "tag" }, `${group.truncated} cut`) : null),
      h("span", { class: "pips" }, group.completions.map(pip)),
      h("span", { class: "num" }, fmt2(group.mean)), h("span", { class: "num spread muted" }, fmt2(group.spread)),
      h("span", { class: "num len muted" }, `${Math.round(group.lenMean)} / ${group.lenMax}`));
    const toggle = () => {
      if (open.delete(group)) { node.lastChild.remove(); openNodes.delete(group); } else { open.add(group); node.append(expanded(group)); }
      button.setAttribute("aria-expanded", String(open.has(group)));
    };
    node.append(button);
    if (open.has(group)) { node.append(expanded(group)); button.setAttribute("aria-expanded", "true"); }
    node.toggle = toggle;
    return node;
  }
  function expanded(group) {
    const data = tokensOf(group), painters = [];
    const node = h("div", { class: "open" },
      h("div", { class: "block" }, h("div", { class: "label" }, `Prompt ${group.id}`), h("pre", {}, group.prompt)),
      group.reference !== null ? h("div", { class: "block" }, h("div", { class: "label" }, "Reference"), h("pre", {}, group.reference)) : null,
      h("div", { class: "completions" }, group.completions.map((item, k) => completionCard(group, item, data[k] || {}, k, painters))));
    openNodes.set(group, () => painters.forEach((paint) => paint()));
    return node;
  }
  function completionCard(group, item, data, index, painters) {
    const fact = (label, value, cls) => h("span", {}, label + " ", h("b", { class: cls || null }, value));
    const header = h("header", {}, h("b", {}, `#${index + 1}`), fact("reward", fmt(item.reward)),
      item.advantage === null ? null : fact("advantage", signed(item.advantage), item.advantage > 0 ? "adv-pos" : item.advantage < 0 ? "adv-neg" : ""),
      Object.entries(item.parts).map(([name, value]) => fact(name, fmt(value))),
      fact("ended by", item.finish === "length" ? "token budget" : item.finish || "–", item.finish === "length" ? "warn" : ""), fact("tokens", item.length),
      fact("weights", `v${item.version}`), item.failure ? fact("failed:", item.failure, "bad") : null);
    if (!data.t) return h("article", { class: "completion" }, header, h("div", { class: "tokens" }, item.text));
    const spans = data.t.map((text, i) => {
      const masked = data.m && !data.m[i];
      const lines = String(text).split("\n"), span = h("span", { class: masked ? "masked" : null });
      lines.forEach((line, n) => { if (n) span.append(h("span", { class: "nl" }, "↵"), "\n"); span.append(line); });
      span.token = i;
      return span;
    });
    painters.push(() => spans.forEach((span, i) => { span.style.background = colourOf(group, item, data, i); }));
    painters[painters.length - 1]();
    const tokens = h("div", { class: "tokens", onpointermove: (event) => {
      let span = event.target;
      while (span !== tokens && span.token === undefined) span = span.parentNode;
      const i = span.token;
      if (i === undefined) return hideTip();
      const sampled = data.s ? data.s[i] : null, trained = data.p ? data.p[i] : null;
      showTip(event, h("b", {}, JSON.stringify(data.t[i])), tipRow("token", `${i + 1} of ${data.t.length}`),
        isNumber(sampled) && tipRow("sampled log-prob", `${sampled.toFixed(4)}  (p ${fmt(Math.exp(sampled))})`),
        isNumber(trained) && tipRow("trained log-prob", trained.toFixed(4)),
        isNumber(trained) && isNumber(sampled) && tipRow("ratio", fmt(Math.round(Math.exp(trained - sampled) * 1e4) / 1e4)),
        item.advantage !== null && tipRow("advantage", signed(item.advantage)), data.m && !data.m[i] && tipRow("loss", "masked"));
    }, onpointerleave: hideTip }, spans);
    return h("article", { class: "completion" }, header, tokens);
  }

  // --------------------------------------------------------------------------------------------------------------- update
  function matches(group) {
    if (state.step !== "all" && group.where !== state.step && state.step !== group.where.split(":")[0]) return false;
    if (state.spread && (group.spread === 0) !== (state.spread === "zero")) return false;
    if (state.trunc && (group.truncated > 0) !== (state.trunc === "only")) return false;
    if (state.failed && (group.failed > 0) !== (state.failed === "only")) return false;
    if (state.min !== "" && !(group.mean >= Number(state.min))) return false;
    return !state.q || group.haystack.includes(state.q.toLowerCase());
  }
  function update() {
    const begun = performance.now(), sign = state.dir === "desc" ? -1 : 1, key = state.sort;
    found = groups.filter(matches);
    found.sort((a, b) => sign * (a[key] < b[key] ? -1 : a[key] > b[key] ? 1 : 0) || a.step - b.step || a.index - b.index);
    const sorted = performance.now();
    body.replaceChildren(); openNodes.clear(); rendered = 0; rows.scrollTop = 0;
    more();
    if (!found.length) body.append(h("div", { class: "empty" }, groups.length ? "No group matches these filters." : "This run recorded no samples."));
    for (const button of head.querySelectorAll("button")) {
      const on = button.dataset.key === state.sort, text = columns.find(([name]) => name === button.dataset.key)[1];
      button.classList.toggle("on", on);
      button.textContent = text + (on ? (state.dir === "asc" ? " ↑" : " ↓") : "");
    }
    const samples = found.reduce((sum, group) => sum + group.completions.length, 0);
    count.textContent = `${found.length} of ${groups.length} groups, ${samples} completions`;
    Object.assign(box.dataset, { total: groups.length, shown: found.length, samples, filterMs: (sorted - begun).toFixed(2), drawMs: (performance.now() - sorted).toFixed(2) });
    remember();
  }
  function more() {
    const next = found.slice(rendered, rendered + CHUNK);
    rendered += next.length;
    body.append(...next.map(rowOf));
    box.dataset.rendered = String(rendered);
  }
  function remember() {
    const changed = Object.entries(state).filter(([key, value]) => key in DEFAULTS && key !== "open" && value !== DEFAULTS[key]);
    try { history.replaceState(null, "", changed.length ? "#" + new URLSearchParams(changed) : location.pathname + location.search); } catch { /* some viewers forbid it on file:// */ }
  }
  let timer = 0;
  const later = () => { clearTimeout(timer); timer = setTimeout(update, 80); };

  const toOpen = Number(state.open) || 0, linked = location.hash.length > 1;
  update();
  recolour();
  [...body.children].slice(0, toOpen).forEach((node) => node.toggle && node.toggle());
  if (linked && state.open === "") box.scrollIntoView({ block: "nearest" });
}
