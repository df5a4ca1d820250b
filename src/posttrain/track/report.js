"use strict";
// Puts the page together from the embedded data.

const DATA = JSON.parse(document.getElementById("run-data").textContent);
const $ = (id) => document.getElementById(id);
const PHASE_COLORS = ["var(--p0)", "var(--p1)", "var(--p2)", "var(--p3)", "var(--p4)", "var(--p5)", "var(--p6)"];
const AREAS = [["reward", "Reward"], ["train", "Training"], ["optim", "Optimizer"], ["val", "Held-out"], ["", "Data and system"]];
const SYSTEM = ["rollout", "time", "sync", "data", "memory"];  // a few charts each: shown together under their full names

function drawHeader() {
  const run = DATA.run, last = DATA.steps[DATA.steps.length - 1];
  const accuracies = DATA.validations.map((item) => item.metrics["val/accuracy"]).filter(isNumber);
  const smoothed = smooth(DATA.series["reward/mean"] || []).filter(isNumber);
  const [label, values] = accuracies.length ? ["held-out accuracy", accuracies] : ["mean reward, smoothed", smoothed];
  const first = values[0], final = values[values.length - 1], delta = Number((final || 0).toFixed(2)) - Number((first || 0).toFixed(2));  // of what is shown, so the line adds up
  const headline = values.length ? h("div", { class: "headline" }, h("div", { class: "label" }, label),
    h("div", { class: "value" }, values.length > 1 ? h("span", { class: "from" }, `${fmt2(first)} → `) : null, fmt2(final),
      values.length > 1 ? h("span", { class: "delta " + (delta > 0.005 ? "up" : delta < -0.005 ? "down" : "muted") }, signed(delta)) : null)) : null;
  const started = isNumber(run.started_unix_s) ? new Date(run.started_unix_s * 1000).toISOString().slice(0, 16).replace("T", " ") + " UTC" : null;
  const facts = [["Algorithm", run.algorithm], ["Model", run.model], ["Device", run.device], ["Seed", run.seed],
    ["Steps", run.total_steps ? `${last} of ${run.total_steps}` : last], ["Duration", fmtTime(run.duration_s)], ["Started", started],
    ...Object.entries(run.details), ...Object.entries(run.summary || {}).map(([key, value]) => [(key[0].toUpperCase() + key.slice(1)).replaceAll("_", " "), isNumber(value) ? fmt(value) : value])];
  $("top").append(
    h("div", {}, h("div", { class: "crumb" }, run.group, h("span", { class: "status " + (/^[a-z]+$/.test(run.status) ? run.status : "") }, run.status)), h("h1", {}, run.name)),
    headline,
    h("dl", { class: "facts" }, facts.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) =>
      h("div", {}, h("dt", {}, name), h("dd", {}, typeof value === "object" ? JSON.stringify(value) : value)))));
}

function drawNotices() {
  const notices = [...DATA.run.damage], [embedded, all] = DATA.run.sample_files;
  if (DATA.run.status === "unfinished") notices.unshift("This run has not recorded an end: it was still running, or was killed. The page shows what had been written.");
  if (embedded < all) notices.push(`Rollouts of ${embedded} of ${all} sample files are included to keep this page small; the rest are in samples/.`);
  $("notices").append(...notices.map((text) => h("div", { class: "notice" }, text)));
}

function drawProgress() {
  const rewards = DATA.series["reward/mean"] || [], many = rewards.filter(isNumber).length >= 8;
  const held = DATA.validations.filter((item) => isNumber(item.metrics["val/accuracy"]));
  const xs = DATA.steps, xRange = [Math.min(xs[0], ...held.map((item) => item.step)), Math.max(xs[xs.length - 1], ...held.map((item) => item.step))];
  const lines = [];
  if (rewards.some(isNumber)) lines.push({ name: "reward", xs, ys: rewards, color: "var(--accent)", width: many ? 1 : 2, opacity: many ? 0.45 : 1 });
  if (many) lines.push({ name: "reward, smoothed", xs, ys: smooth(rewards), color: "var(--accent)", width: 2.2 });
  if (held.length) lines.push({ name: "held-out accuracy", xs: held.map((item) => item.step), ys: held.map((item) => item.metrics["val/accuracy"]), color: "var(--held)", width: 2, dots: true });
  $("progress").append(
    h("div", { class: "legend" }, lines.map((line) => h("span", {}, h("i", { class: "key", style: `background:${line.color};opacity:${line.opacity || 1}` }), line.name))),
    lines.length ? lineChart({ lines, height: 320, label: "Reward and held-out accuracy by step", xRange, xName: "step", fromZero: true }) : h("p", { class: "muted" }, "No reward/mean was recorded."));
}

function drawTime() {
  const keys = Object.keys(DATA.series).filter((key) => /^time\/.+_s$/.test(key) && key !== "time/step_s");
  const steps = DATA.series["time/step_s"] || [], sum = (list) => list.reduce((a, b) => a + (b || 0), 0);
  const parts = keys.map((key, i) => ({ name: key.slice(5, -2), color: PHASE_COLORS[i % PHASE_COLORS.length], ys: DATA.series[key].map((value) => value || 0) }));
  const other = steps.map((total, i) => Math.max((total || 0) - parts.reduce((a, part) => a + part.ys[i], 0), 0));
  if (sum(other) > 0) parts.push({ name: "other", color: "var(--other)", ys: other });
  const totals = parts.map((part) => ({ ...part, total: sum(part.ys) + (DATA.leftover_phases[part.name] || 0) }));
  for (const [name, seconds] of Object.entries(DATA.leftover_phases)) if (!parts.some((part) => part.name === name)) totals.push({ name, color: PHASE_COLORS[totals.length % PHASE_COLORS.length], total: seconds });
  totals.sort((a, b) => b.total - a.total);
  const all = sum(totals.map((item) => item.total));
  if (!all) return $("time").append(h("p", { class: "muted" }, "No phase times were recorded."));
  $("time").append(
    h("div", { class: "shares" }, totals.map((item) => h("div", { style: `width:${item.total / all * 100}%;background:${item.color}`, onpointermove: (event) => showTip(event, h("b", {}, item.name), tipRow("total", fmtTime(item.total))), onpointerleave: hideTip }))),
    h("div", { class: "share-table" }, totals.map((item) => h("div", {}, h("i", { class: "key box", style: `background:${item.color}` }), item.name,
      h("span", { class: "pct" }, (item.total / all * 100).toFixed(item.total / all < 0.0995 ? 1 : 0) + "%"), h("span", { class: "sec" }, fmtTime(item.total))))),
    stackedBars({ steps: DATA.steps, parts, height: 230, label: "Seconds per phase and step" }));
}

function drawMetrics() {
  const arrows = { up: "↑ better", down: "↓ better", none: "" }, areas = new Map(AREAS.map(([area]) => [area, []]));
  for (const key of Object.keys(DATA.series)) {
    const area = key.split("/")[0];
    if (area === "time" && key !== "time/step_s") continue;  // shown above as bars
    const group = SYSTEM.includes(area) ? "" : area;
    if (!areas.has(group)) areas.set(group, []);
    areas.get(group).push(key);
  }
  const titles = new Map(AREAS), xRange = [DATA.steps[0], DATA.steps[DATA.steps.length - 1]];
  for (const [area, keys] of areas) {
    // the held-out curve of the first chart also holds evaluations made between two step lines
    const shown = keys.filter((key) => key !== "reward/mean" && key !== "val/accuracy");
    if (!shown.length) continue;
    $("metrics").append(h("h3", {}, titles.get(area) || area), h("div", { class: "minis" }, shown.map((key) => {
      const ys = DATA.series[key], known = ys.filter(isNumber), [unit, meaning, better] = DATA.docs[key] || ["", "", "none"];
      const explain = (event) => showTip(event, h("b", {}, key), meaning ? `\n${meaning}` : "", arrows[better] ? `\n${arrows[better]}` : "");
      const many = known.length >= 30;
      const lines = [{ name: key.split("/").slice(1).join("/"), xs: DATA.steps, ys, color: "var(--accent)", width: many ? 1 : 1.6, opacity: many ? 0.4 : 1 }];
      if (many) lines.push({ name: "smoothed", xs: DATA.steps, ys: smooth(ys), color: "var(--accent)", width: 1.8 });
      return h("div", { class: "card mini" },
        h("div", { class: "head" }, h("span", { class: "name", tabindex: "0", onpointermove: explain, onpointerleave: hideTip, "aria-label": `${key}: ${meaning}` }, area ? key.split("/").slice(1).join("/") : key),
          h("span", { class: "last" }, fmt(known[known.length - 1]), unit && !["fraction", "ratio", "reward", "0/1"].includes(unit) ? h("span", { class: "unit" }, unit) : null)),
        known.length ? lineChart({ lines, height: 112, compact: true, label: `${key} by step`, xRange, xName: "" }) : h("p", { class: "muted" }, "never finite"));
    })));
  }
}

function drawEvents() {
  const shown = DATA.events, box = $("events");
  if (!shown.length) return box.append(h("div", { class: "empty" }, "No events were recorded."));
  const warnings = shown.filter((event) => event.kind === "warning" || event.kind === "error").length;
  $("events-title").textContent = warnings ? `Warnings and events (${warnings} warning${warnings > 1 ? "s" : ""})` : "Events";
  const rank = (event) => event.kind === "error" ? 0 : event.kind === "warning" ? 1 : 2;
  const sorted = [...shown].sort((a, b) => rank(a) - rank(b) || (a.time_s || 0) - (b.time_s || 0));
  box.append(...sorted.slice(0, 400).map((event) => {
    const { time_s, unix_s, kind, message, ...rest } = event;
    const extra = Object.entries(rest).map(([key, value]) => `${key}=${typeof value === "object" ? JSON.stringify(value) : value}`).join("  ");
    return h("div", { class: "event " + (/^[a-z_]+$/.test(kind) ? kind : "") }, h("span", { class: "muted" }, fmtTime(time_s)), h("span", { class: "kind" }, String(kind).replaceAll("_", " ")),
      h("span", { class: "what" }, message || "", message || !extra ? "" : extra));
  }));
  if (sorted.length > 400) box.append(h("div", { class: "empty" }, `${sorted.length - 400} more in events.jsonl`));
}

function drawSetup() {
  const box = $("setup");
  if (DATA.objective && typeof DATA.objective === "object") {
    box.append(h("details", { class: "card", open: true }, h("summary", {}, "Effective objective"), h("dl", { class: "kv" },
      Object.entries(DATA.objective).map(([key, value]) => [h("dt", {}, key), h("dd", {}, typeof value === "object" ? JSON.stringify(value) : value)]))));
  }
  if (!DATA.config) return box.append(h("div", { class: "card muted" }, "The run directory holds no config_resolved.yaml."));
  const code = h("pre", { class: "code" });
  for (const line of DATA.config.split("\n")) {
    const match = /^(\s*(?:- )?)([\w.\-/]+)(:)(.*)$/.exec(line);
    if (line.trimStart().startsWith("#")) code.append(h("span", { class: "c" }, line), "\n");
    else if (match) code.append(match[1], h("span", { class: "k" }, match[2]), match[3] + match[4] + "\n");
    else code.append(line + "\n");
  }
  box.append(h("details", { class: "card" }, h("summary", {}, "config_resolved.yaml"), code));
}

drawHeader();
drawNotices();
drawProgress();
groupsTable($("groups"), DATA.groups);
drawTime();
drawMetrics();
drawEvents();
drawSetup();
$("made").textContent = "Made by posttrain report from metrics.jsonl, events.jsonl and samples/. This file needs no network.";
document.body.dataset.ready = "1";
