"use strict";
(async () => {
  const $ = (id) => document.getElementById(id);
  if (typeof DecompressionStream === "undefined") return; // the static page remains
  const packed = Uint8Array.from(atob($("data").textContent), (c) => c.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const found = JSON.parse(await new Response(unpacked).text());

  // Rows are stored as columns.
  const rows = (columns) => {
    const names = Object.keys(columns);
    const length = names.length ? columns[names[0]].length : 0;
    return Array.from({ length }, (_, n) => Object.fromEntries(names.map((k) => [k, columns[k][n]])));
  };
  const step = found.step, operators = step.operators, moments = step.moments;
  const parts = rows(step.parts), plans = rows(found.plans), rules = rows(found.baselines);
  const count = moments.operator ? moments.operator.length : 0;
  const HELD = 1, RUNNING = 2;
  const KINDS = [["running", "temporaries of forward"], ["recomputed", "recomputed values"],
    ["workspace", "temporaries of backward"]];

  // Words.
  const escaped = (text) => String(text).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  const bytes = (n) => {
    let power = 0, amount = Math.abs(n);
    while (amount >= 1023.995 && power < units.length - 1) { amount /= 1024; power += 1; }
    return `${n < 0 ? "-" : ""}${Number(amount.toFixed(2))} ${units[power]}`;
  };
  const seconds = (s) => {
    if (s === 0) return "0 s";
    for (const [scale, unit] of [[1, "s"], [1e3, "ms"], [1e6, "us"]])
      if (s * scale >= 1) return `${Number((s * scale).toPrecision(3))} ${unit}`;
    return `${Number((s * 1e9).toPrecision(3))} ns`;
  };
  const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}%` : "-");
  const slower = (s) => {
    const share = found.plain_seconds ? s / found.plain_seconds - 1 : 0;
    if (Math.abs(share) < 0.0005) return "as fast as plain";
    return `${(100 * Math.abs(share)).toFixed(1)}% ${share > 0 ? "slower" : "faster"}`;
  };
  const phaseOf = (m) => step.phases.filter(([, first]) => first <= m).pop() || ["step", 0];
  const isForward = (m) => phaseOf(m)[0].startsWith("forward");
  const moduleOf = (part) => (part ? part.module || part.block : "");
  const within = (part, word) => (/^(before|after) /.test(moduleOf(part)) ? moduleOf(part) : `${word} ${moduleOf(part)}`);

  // Blocks, and neighbours of one pattern as groups: h.0 to h.35 are one row.
  const blocks = [], blockOf = [];
  parts.forEach((part, n) => {
    const last = blocks[blocks.length - 1];
    if (last && last.name === part.block) last.parts.push(n);
    else blocks.push({ name: part.block, parts: [n] });
    blockOf.push(blocks.length - 1);
  });
  const pattern = (name) => name.replace(/\d+/g, "#");
  const groups = [];
  blocks.forEach((block, n) => {
    const last = groups[groups.length - 1];
    if (last && last.pattern === pattern(block.name)) last.blocks.push(n);
    else groups.push({ pattern: pattern(block.name), blocks: [n] });
  });
  const operatorsOf = parts.map(() => new Set());
  for (let m = 0; m < count; m += 1)
    if (isForward(m)) operatorsOf[moments.part[m]].add(operators[moments.operator[m]]);

  // The memory of a plan: bands, the lowest first, and their sum at every moment.
  const memory = new Map();
  const running = (allocations, chosen) => {
    const change = new Float64Array(count + 1);
    for (let n = 0; n < allocations.length; n += 1) {
      const a = allocations[n];
      if (chosen(a)) { change[a.first] += a.bytes; change[a.last + 1] -= a.bytes; }
    }
    for (let m = 1; m < count; m += 1) change[m] += change[m - 1];
    return change.subarray(0, count);
  };
  const memoryOf = (number) => {
    if (memory.has(number)) return memory.get(number);
    const all = rows(plans[number].allocations);
    const resident = step.resident.reduce((sum, [, n]) => sum + n, 0);
    const other = moments.other_bytes || [];
    const bands = step.resident.map(([name, n]) =>
      ({ name, category: "fixed", at: new Float64Array(count).fill(n) }));
    bands.push({ name: "gradients, optimizer state, batch and workspace", category: "fixed",
      at: Float64Array.from(other, (n) => n - resident) });
    bands.push({ name: "room for the optimizer's state", category: "fixed",
      at: new Float64Array(count).fill(step.reserved_bytes) });
    const byBlock = blocks.map(() => []), before = [];
    for (const a of all) if (a.category === HELD) (a.part < 0 ? before : byBlock[blockOf[a.part]]).push(a);
    const yes = () => true;
    blocks.forEach((block, n) => bands.push({ name: `saved by ${block.name}`, category: "held", at: running(byBlock[n], yes) }));
    bands.push({ name: "saved before the step", category: "held", at: running(before, yes) });
    KINDS.forEach(([category, name], n) =>
      bands.push({ name, category, at: running(all, (a) => a.category === RUNNING + n) }));
    const total = new Float64Array(count);
    for (const band of bands) for (let m = 0; m < count; m += 1) total[m] += band.at[m];
    const used = bands.filter((band) => band.at.some((n) => n !== 0));
    for (const band of used) {
      const same = used.filter((b) => b.category === band.category);
      band.opacity = 1 - (0.6 * same.indexOf(band)) / Math.max(same.length - 1, 1);
    }
    const result = { all, bands: used, total, is_known: all.length > 0 || !plans[number].peak_bytes };
    memory.set(number, result);
    return result;
  };

  // State.
  let plan = found.chosen, from = 0, to = count, cursor = plans[plan].peak_moment;
  let pinned = false, marked = null;
  const opened = new Set();
  const plain = plans.findIndex((view) => view.name === "plain") < 0 ? plans.length - 1 : plans.findIndex((view) => view.name === "plain");

  // Drawing: charts have the size of their place, so that text stays readable.
  const LEFT = 76, TOP = 24, BOTTOM = 30, RIGHT = 12;
  const line = (x1, y1, x2, y2, colour, more = "") =>
    `<line x1="${x1}" y1="${y1}" x2="${x2}" y2="${y2}" stroke="var(--${colour})" ${more}/>`;
  const label = (text, x, y, more = "") => `<text x="${x}" y="${y}" ${more}>${escaped(text)}</text>`;
  const ticks = (low, high, base, wanted) => {
    const rough = (high - low) / wanted;
    if (!(rough > 0)) return [low];
    const power = base ** Math.floor(Math.log(rough) / Math.log(base));
    const size = (base === 10 ? [1, 2, 5, 10] : [1, 2]).map((f) => f * power).find((s) => s >= rough) || power * base;
    const ticksFound = [];
    for (let n = Math.ceil(low / size); n * size <= high * (1 + 1e-9); n += 1) ticksFound.push(n * size);
    return ticksFound;
  };
  const prepare = (place, title) => {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("class", "live");
    svg.setAttribute("tabindex", "0");
    svg.setAttribute("role", "application");
    svg.setAttribute("aria-label", title);
    place.replaceChildren(svg);
    return svg;
  };
  const frontier = prepare($("frontier"), "Time versus memory: plans and rules");
  const chart = prepare($("memory"), "Memory over the step");
  frontier.removeAttribute("tabindex");
  frontier.setAttribute("role", "group");

  const drawFrontier = () => {
    const width = $("frontier").clientWidth, height = Math.min(320, Math.max(220, width * 0.4));
    const points = [...plans, ...rules];
    const peaks = points.map((p) => p.peak_bytes), times = points.map((p) => p.seconds);
    const low = Math.min(...peaks), high = Math.max(...peaks, found.budget_bytes, 1);
    const margin = (high - low) * 0.06 || high * 0.5;
    const slow = Math.max(...times), fast = Math.min(...times);
    const gap = (slow - fast) * 0.14 || slow * 0.5 || 1;
    const right = width - RIGHT, floor = height - BOTTOM;
    const x = (n) => +(LEFT + ((n - low + margin) / (high - low + 2 * margin)) * (right - LEFT)).toFixed(1);
    const y = (s) => +(floor - ((s - fast + gap) / (slow - fast + 2 * gap)) * (floor - TOP)).toFixed(1);
    let out = label("time of a step", 4, 14, 'fill="var(--quiet)"');
    for (const s of ticks(fast - gap, slow + gap, 10, 4)) if (s >= 0)
      out += line(LEFT, y(s), right, y(s), "line") + label(seconds(s), LEFT - 8, y(s) + 4, 'text-anchor="end"');
    for (const n of ticks(low - margin, high + margin, 2, width < 500 ? 3 : 6)) if (n >= 0)
      out += line(x(n), floor, x(n), floor + 5, "quiet") + label(bytes(n), x(n), height - 8, 'text-anchor="middle"');
    let best = null, path = "";
    const lines = [];
    for (const view of plans) if (!best || view.seconds < best.seconds) {
      const [cx, cy] = [x(view.peak_bytes), y(view.seconds)];
      if (best) {
        const [bx, by] = [x(best.peak_bytes), y(best.seconds)];
        lines.push([bx, by, cx, by], [cx, by, cx, cy]);
      }
      path += best ? `H${cx}V${cy}` : `M${cx} ${cy}`;
      best = view;
    }
    if (best) lines.push([x(best.peak_bytes), y(best.seconds), right, y(best.seconds)]);
    out += `<path class="steps" d="${path}H${right}" fill="none" stroke="var(--held)" stroke-width="2"/>`;
    if (found.budget_bytes) {
      const at = x(found.budget_bytes);
      out += line(at, TOP, at, floor, "accent", 'stroke-dasharray="6 4"');
      const middle = Math.max(150, Math.min(right - 55, at));
      out += label(`budget ${bytes(found.budget_bytes)}`, middle, TOP - 8, 'text-anchor="middle" fill="var(--accent)"');
    }
    const names = new Map();
    for (const rule of rules) {
      const key = `${rule.peak_bytes} ${rule.seconds}`;
      names.set(key, { ...rule, name: names.has(key) ? `${names.get(key).name}; ${rule.name}` : rule.name });
    }
    // A label is placed where it covers no other and not the line, or shows on hover.
    const taken = lines.map(([x1, y1, x2, y2]) => [Math.min(x1, x2) - 3, Math.min(y1, y2) - 3, Math.max(x1, x2) + 3, Math.max(y1, y2) + 3]);
    for (const view of plans) taken.push([x(view.peak_bytes) - 7, y(view.seconds) - 7, x(view.peak_bytes) + 7, y(view.seconds) + 7]);
    const isFree = ([x1, y1, x2, y2]) => x1 > LEFT && x2 < right && y1 > TOP - 8 && y2 < floor &&
      !taken.some(([a, b, c, d]) => a < x2 && c > x1 && b < y2 && d > y1);
    for (const rule of names.values()) taken.push([x(rule.peak_bytes) - 5, y(rule.seconds) - 5, x(rule.peak_bytes) + 5, y(rule.seconds) + 5]);
    for (const rule of names.values()) {
      const cx = x(rule.peak_bytes), cy = y(rule.seconds), size = rule.name.length * 6.4;
      const spot = [[cx + 9, cy + 4], [cx - 9 - size, cy + 4], [cx - 4, cy - 9], [cx + 4 - size, cy - 9], [cx - 4, cy + 19],
        [cx + 4 - size, cy + 19]].map(([tx, ty]) => [tx, ty - 11, tx + size, ty + 2]).find(isFree);
      out += `<g><title>${escaped(rule.name)}: ${bytes(rule.peak_bytes)}, ${seconds(rule.seconds)}</title>`;
      out += `<rect x="${cx - 4}" y="${cy - 4}" width="8" height="8" fill="var(--paper)" stroke="var(--quiet)" stroke-width="1.5"/>`;
      if (spot) {
        taken.push(spot);
        out += label(rule.name, spot[0], spot[3] - 2, 'fill="var(--quiet)"');
      }
      out += "</g>";
    }
    plans.forEach((view, n) => {
      const now = n === plan, chosen = n === found.chosen;
      out += `<a href="#plan-${n}" data-plan="${n}" aria-label="${escaped(wordsOf(n))}"${now ? ' aria-current="true"' : ""}>` +
        `<title>${escaped(wordsOf(n))}</title><circle cx="${x(view.peak_bytes)}" cy="${y(view.seconds)}" r="${now ? 8 : 5}" ` +
        `fill="var(--${chosen ? "accent" : "held"})" stroke="var(--${now ? "ink" : "paper"})" stroke-width="2"/></a>`;
    });
    frontier.setAttribute("viewBox", `0 0 ${width} ${height}`);
    frontier.setAttribute("height", height);
    frontier.setAttribute("fill", "var(--ink)");
    frontier.innerHTML = out;
  };

  // Columns of the visible part: among moments that share a column, the highest.
  const columnsOf = (total, most) => {
    const first = Math.floor(from), size = Math.ceil(to) - first, wanted = Math.max(1, Math.min(size, most));
    const columns = [], starts = [];
    for (let n = 0; n < wanted; n += 1) {
      let best = first + Math.floor((size * n) / wanted);
      const stop = first + Math.floor((size * (n + 1)) / wanted);
      starts.push(best);
      for (let m = best + 1; m < stop; m += 1) if (total[m] > total[best]) best = m;
      columns.push(best);
    }
    return { columns, starts };
  };
  let scale = null;
  const drawChart = () => {
    const width = $("memory").clientWidth, height = width < 500 ? 260 : 340;
    const right = width - RIGHT, floor = height - BOTTOM;
    const { bands, total, is_known } = memoryOf(plan);
    const overlay = $("overlay").checked, base = memoryOf(plain);
    let top = Math.max(found.budget_bytes, plans[plan].peak_bytes, 1);
    if (overlay) top = Math.max(top, plans[plain].peak_bytes);
    top *= 1.08;
    const y = (n) => +(floor - (n / top) * (floor - TOP)).toFixed(1);
    const x = (m) => +(LEFT + ((m - from) / Math.max(to - from, 1)) * (right - LEFT)).toFixed(1);
    scale = { x, right };
    const { columns, starts } = columnsOf(total, right - LEFT);
    const xs = starts.map((m) => Math.max(LEFT, x(m)));
    const outline = (heights) => {
      const there = [];
      heights.forEach((h, n) => {
        if (n && h === heights[n - 1]) return;
        there.push(`${n ? `H${xs[n]}` : `M${xs[0]} ${y(h)}`}${n ? `V${y(h)}` : ""}`);
      });
      return `${there.join("")}H${right}`;
    };
    let out = "";
    for (const n of ticks(0, top, 2, 5))
      out += line(LEFT, y(n), right, y(n), "line") + label(bytes(n), LEFT - 8, y(n) + 4, 'text-anchor="end"');
    // Filled from above, so that each band covers what is below its own outline.
    const stacked = columns.map(() => 0), outlines = [];
    for (const band of bands) {
      columns.forEach((m, n) => { stacked[n] += Math.max(band.at[m], 0); });
      outlines.push([band, columns.map((m, n) => Math.min(stacked[n], Math.max(total[m], 0)))]);
    }
    for (const [band, heights] of outlines.reverse())
      out += `<path d="${outline(heights)}V${floor}H${LEFT}Z" fill="var(--paper)"/><path d="${outline(heights)}V${floor}H${LEFT}Z" fill="var(--${band.category})" fill-opacity="${band.opacity.toFixed(2)}"/>`;
    if (marked) {
      const at = running(memoryOf(plan).all, marked.has);
      out += `<path class="marked" d="${outline(columns.map((m) => at[m]))}V${floor}H${LEFT}Z" fill="var(--mark)" fill-opacity=".75" stroke="var(--paper)"><title>${escaped(marked.name)}</title></path>`;
    }
    if (overlay)
      out += `<path class="overlay" d="${outline(columns.map((m) => base.total[m]))}" fill="none" stroke="var(--ink)" stroke-width="1.5"/>`;
    step.phases.forEach(([name, first], n) => {
      const stop = n + 1 < step.phases.length ? step.phases[n + 1][1] : count;
      const a = Math.max(first, from), b = Math.min(stop, to);
      if (a >= b) return;
      if (first > from) out += line(x(first), TOP, x(first), floor, "quiet", 'stroke-dasharray="2 4"');
      out += label(name, (x(a) + x(b)) / 2, height - 8, 'text-anchor="middle" fill="var(--quiet)"');
    });
    if (found.budget_bytes) {
      const at = y(found.budget_bytes);
      out += line(LEFT, at, right, at, "accent", 'stroke-dasharray="6 4"');
      out += label(`budget ${bytes(found.budget_bytes)}`, right - 4, at - 5, 'text-anchor="end" fill="var(--accent)"');
    }
    const peak = plans[plan].peak_moment;
    if (count && peak + 0.5 >= from && peak + 0.5 <= to)
      out += `<circle cx="${x(peak + 0.5)}" cy="${y(plans[plan].peak_bytes)}" r="4" fill="var(--accent)"><title>peak ${bytes(plans[plan].peak_bytes)}</title></circle>`;
    if (!is_known) out += label("This page has no details of this plan: the step is too large.", LEFT + 8, TOP + 20);
    out += '<line class="cursor" stroke="var(--ink)" stroke-width="1"/>';
    chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
    chart.setAttribute("height", height);
    chart.setAttribute("fill", "var(--ink)");
    chart.innerHTML = out;
    $("legend-live").innerHTML = legendOf(bands, overlay);
    drawCursor();
  };
  const swatch = (category, opacity) =>
    `<svg viewBox="0 0 12 12" width="12" height="12" aria-hidden="true"><rect width="12" height="12" fill="var(--${category})" fill-opacity="${opacity}"/></svg>`;
  const legendOf = (bands, overlay) => {
    const shown = bands.filter((b) => b.category === "fixed").map((b) => [b.category, b.opacity, b.name]);
    if (bands.some((b) => b.category === "held")) shown.push(["held", 1, "saved for backward, a shade for each block"]);
    for (const b of bands) if (b.category !== "fixed" && b.category !== "held") shown.push([b.category, 1, b.name]);
    if (overlay) shown.push(["ink", 1, "line: the plain step"]);
    if (marked) shown.push(["mark", 0.75, marked.name]);
    return shown.map(([category, opacity, name]) => `<li>${swatch(category, opacity)} ${escaped(name)}</li>`).join("");
  };

  // The moment under the cursor.
  const short = (name) => name.replace(/^aten\./, "").replace(/\.default$/, "");
  const describe = (m) => {
    const part = parts[moments.part[m]], name = short(operators[moments.operator[m]]);
    if (isForward(m)) return `${name} ${within(part, "in")}, ${seconds(moments.seconds[m])}`;
    if (operators[moments.operator[m]] === "the end of backward") return "the end of backward";
    return `next: gradient of ${name} ${within(part, "in")}`;
  };
  const list = (entries, most) => {
    const sorted = entries.filter(([, n]) => n > 0).sort((a, b) => b[1] - a[1]);
    const rest = sorted.slice(most).reduce((sum, [, n]) => sum + n, 0);
    const shown = sorted.slice(0, most);
    if (rest) shown.push([`${sorted.length - most} others`, rest]);
    return shown;
  };
  const cells = (entries, last) => entries.map((entry) =>
    `<tr><th scope="row">${escaped(entry[0])}</th><td>${bytes(entry[1])}</td><td>${last(entry)}</td></tr>`).join("");
  const drawCursor = () => {
    if (!count) return;
    cursor = Math.max(0, Math.min(count - 1, cursor));
    const mark = chart.querySelector(".cursor");
    const inside = cursor + 0.5 >= from && cursor + 0.5 <= to, at = inside ? scale.x(cursor + 0.5) : -9;
    const bottom = chart.viewBox.baseVal.height - BOTTOM;
    for (const [key, value] of Object.entries({ x1: at, x2: at, y1: TOP, y2: bottom })) mark.setAttribute(key, value);
    const { all, bands, total } = memoryOf(plan);
    const plainBytes = memoryOf(plain).total[cursor];
    const isPeak = cursor === plans[plan].peak_moment;
    $("place").textContent = `${isPeak ? "The peak" : "Moment"}: ${cursor + 1} of ${count}, ${phaseOf(cursor)[0]}${pinned ? " (pinned)" : ""}`;
    const reruns = rows(plans[plan].reruns).filter((r) => r.moment === cursor);
    const again = reruns.map((r) => `; first recomputes ${r.operators} operators ${within(parts[r.part], "from")}, ${seconds(r.seconds)}`).join("");
    $("where").textContent = `${describe(cursor)}: ${bytes(total[cursor])} in use${again}. Plain: ${bytes(plainBytes)}.`;
    // Bands are shown as drawn: clipped at the sum, where bytes were freed early.
    let below = 0;
    const shares = [];
    for (const band of bands) {
      const upto = Math.min(below + Math.max(band.at[cursor], 0), Math.max(total[cursor], 0));
      shares.push([band.name, upto - below]);
      below = upto;
    }
    $("alive").tBodies[0].innerHTML = cells(list(shares, 8), ([, n]) => percent(n, total[cursor]));
    const alive = all.filter((a) => a.first <= cursor && cursor <= a.last);
    const tensors = alive.map((a) => {
      const name = a.maker >= 0 && a.category <= RUNNING ? short(operators[moments.operator[a.maker]]) : KINDS.map(([, k]) => k)[a.category - RUNNING] || "tensor";
      const part = parts[a.part];
      return [`${name}${part ? ` ${within(part, "of")}` : ""}`, a.bytes, `${a.first + 1} to ${a.last + 1}`];
    });
    $("tensors").innerHTML = `<table><thead><tr><th scope="col">${alive.length} tensors that a plan decides on</th><th scope="col">bytes</th><th scope="col">moments</th></tr></thead><tbody>${cells(list(tensors, 8), ([, , when]) => when || "")}</tbody></table>`;
    chart.setAttribute("aria-label", `Memory over the step. ${$("place").textContent}. ${$("where").textContent}`);
  };

  // The table of blocks and modules.
  const costOf = (numbers) => {
    const costs = plans[plan].costs, sum = { operators: 0, seconds: 0, saved: 0, kept: 0, sent: 0, again: 0 };
    for (const n of numbers) {
      sum.operators += parts[n].operators; sum.seconds += parts[n].seconds; sum.saved += parts[n].saved_bytes;
      sum.kept += costs.kept_bytes[n]; sum.sent += costs.offloaded_bytes[n]; sum.again += costs.replay_seconds[n];
    }
    sum.dropped = sum.saved - sum.kept - sum.sent;
    return sum;
  };
  const actionOf = (cost) => {
    if (!cost.saved) return "nothing saved";
    const done = [["recompute", cost.dropped], ["offload", cost.sent]].filter(([, n]) => n);
    if (!done.length) return "keep";
    if (done.length === 1 && done[0][1] === cost.saved) return done[0][0];
    return done.map(([name, n]) => `${name} ${percent(n, cost.saved)}`).join(", ");
  };
  const treeRow = (key, name, depth, numbers, opens) => {
    const cost = costOf(numbers), is_open = opened.has(key);
    const share = (n) => `${(100 * n) / (cost.saved || 1)}%`;
    const bar = cost.saved ? `<span class="bar" aria-hidden="true"><i style="width:${share(cost.kept)};background:var(--held)"></i><i style="width:${share(cost.sent)};background:var(--fixed)"></i><i style="width:${share(cost.dropped)};background:var(--recomputed)"></i></span> ` : "";
    const toggle = opens ? `<button type="button" class="open" data-open="${escaped(key)}" aria-expanded="${is_open}" aria-label="Open ${escaped(name)}" tabindex="-1">${is_open ? "▾" : "▸"}</button>` : '<span class="open" style="display:inline-block"></span>';
    const cells = [cost.operators, seconds(cost.seconds), bytes(cost.saved), bytes(cost.kept), bytes(cost.sent), bytes(cost.dropped), seconds(cost.again)];
    return `<tr data-key="${escaped(key)}"${marked && marked.key === key ? ' class="marked"' : ""}><th scope="row" style="padding-left:${1.2 * depth}rem">${toggle}<button type="button" class="name" data-parts="${numbers.join(" ")}">${escaped(name)}</button></th><td>${bar}${actionOf(cost)}</td>${cells.map((c) => `<td>${c}</td>`).join("")}</tr>`;
  };
  const drawTree = () => {
    const words = $("search").value.trim().toLowerCase();
    const matches = (n) => !words || `${parts[n].block} ${parts[n].module}`.toLowerCase().includes(words) ||
      [...operatorsOf[n]].some((name) => name.toLowerCase().includes(words));
    let out = "";
    for (const group of groups) {
      const inside = group.blocks.map((b) => [blocks[b], blocks[b].parts.filter(matches)]).filter(([, p]) => p.length);
      if (!inside.length) continue;
      const numbers = inside.flatMap(([, p]) => p), key = `g ${group.blocks[0]}`;
      const folds = group.blocks.length > 1;
      if (folds) {
        const [first, last] = [inside[0][0].name, inside[inside.length - 1][0].name];
        out += treeRow(key, inside.length > 1 ? `${first} to ${last} (${inside.length})` : first, 0, numbers, true);
      }
      if (folds && !opened.has(key)) continue;
      for (const [block, mine] of inside) {
        const own = `b ${block.name}`, depth = folds ? 1 : 0;
        const opens = mine.length > 1 || (mine.length && parts[mine[0]].module !== block.name && parts[mine[0]].module !== "");
        out += treeRow(own, block.name, depth, mine, opens);
        if (opens && opened.has(own)) for (const n of mine) {
          const path = parts[n].module || "(the model itself)";
          const name = path === block.name ? "(the block itself)" : path.startsWith(`${block.name}.`) ? path.slice(block.name.length + 1) : path;
          out += treeRow(`p ${n}`, name, depth + 1, [n], false);
        }
      }
    }
    const body = $("tree").tBodies[0], focused = document.activeElement && document.activeElement.closest("#tree tr");
    const key = focused && focused.dataset.key;
    body.innerHTML = out || '<tr><th scope="row">No module or operator matches.</th></tr>';
    if (key) [...body.rows].filter((r) => r.dataset.key === key).forEach((r) => r.querySelector(".name").focus());
  };
  const markParts = (key, name, numbers) => {
    const wanted = new Set(numbers);
    marked = marked && marked.key === key ? null : { key, name, has: (a) => wanted.has(a.part) };
    drawTree();
    drawChart();
  };
  const search = () => {
    const words = $("search").value.trim().toLowerCase();
    marked = words ? { key: "", name: `matches “${words}”`, has: (a) => {
      const part = parts[a.part];
      if (part && `${part.block} ${part.module}`.toLowerCase().includes(words)) return true;
      return a.maker >= 0 && operators[moments.operator[a.maker]].toLowerCase().includes(words);
    } } : null;
    drawTree();
    drawChart();
  };

  // Plans.
  const wordsOf = (n) => {
    const view = plans[n];
    const host = view.host_bytes ? `; ${bytes(view.host_bytes)} on the host` : "";
    return `${view.name}${n === found.chosen ? (found.budget_bytes && view.peak_bytes > found.budget_bytes ? " (does not fit)" : " (active)") : ""}: ${bytes(view.peak_bytes)} at the peak, ` +
      `${percent(view.peak_bytes, found.plain_peak_bytes)} of plain; ${seconds(view.seconds)} a step, ${slower(view.seconds)}${host}`;
  };
  const show = (number) => {
    plan = Math.max(0, Math.min(plans.length - 1, number));
    if (!pinned) cursor = plans[plan].peak_moment;
    const words = wordsOf(plan);
    $("choice").value = String(plan);
    $("choice").setAttribute("aria-valuetext", words);
    document.querySelector(".slider output").textContent = words;
    const text = plans[plan].plan, kind = text.includes("compiled plan") ? "results.CompiledPlan" : "Plan";
    $("apply").hidden = !text;
    $("apply").querySelector("code").textContent = plan === plain ? "# The plain step: nothing to apply." :
      `import pathlib\nimport recoup${kind === "Plan" ? "" : ".results"}\n\nplan = recoup.${kind}.from_json(pathlib.Path("plan.json").read_text())\n` +
      `applied = recoup.apply_plan(model, plan)  # applied.remove() removes it\n\n` +
      `# Or measure and check it here:\n# model, report = recoup.fit(model, batch, budget=${found.budget_bytes && plan === found.chosen ? found.budget_bytes : plans[plan].peak_bytes})`;
    drawFrontier();
    drawChart();
    drawTree();
  };

  // Zoom and pan.
  // The visible part may begin within a moment: the point under the pointer stays.
  const zoom = (factor, around) => {
    const size = Math.max(Math.min(count, 4), Math.min(count, (to - from) * factor));
    const share = (around - from) / Math.max(to - from, 1);
    from = Math.max(0, Math.min(count - size, around - share * size));
    to = from + size;
    drawChart();
  };
  const pan = (by) => {
    const size = to - from;
    from = Math.max(0, Math.min(count - size, from + by));
    to = from + size;
    drawChart();
  };
  const whole = () => { from = 0; to = count; drawChart(); };
  const move = (m) => {
    cursor = Math.max(0, Math.min(count - 1, m));
    pinned = true;
    if (cursor < from) pan(cursor - from); else if (cursor + 1 > to) pan(cursor + 1 - to); else drawCursor();
  };
  const toPeak = () => {
    const m = plans[plan].peak_moment, size = Math.max(8, Math.min(to - from, Math.round(count / 8)));
    from = Math.max(0, Math.min(count - size, m - Math.round(size / 2)));
    to = Math.min(count, from + size);
    drawChart();
    move(m);
  };
  const placeAt = (event) => {
    const box = chart.getBoundingClientRect();
    const x = ((event.clientX - box.left) * chart.viewBox.baseVal.width) / box.width - LEFT;
    return Math.max(from, Math.min(to, from + (x / (scale.right - LEFT)) * (to - from)));
  };
  const momentAt = (event) => Math.min(Math.floor(placeAt(event)), Math.ceil(to) - 1);
  const pointers = new Map();
  let dragged = 0;
  chart.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event);
    dragged = 0;
    chart.setPointerCapture(event.pointerId);
  });
  chart.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) {
      if (!pinned) { cursor = momentAt(event); drawCursor(); }
      return;
    }
    const perPixel = (to - from) / (scale.right - LEFT), moved = event.clientX - before.clientX;
    if (pointers.size === 2) {
      const [other] = [...pointers.values()].filter((p) => p.pointerId !== event.pointerId);
      const was = Math.abs(before.clientX - other.clientX), now = Math.abs(event.clientX - other.clientX);
      if (Math.abs(now - was) > 4) { zoom(was / Math.max(now, 1), placeAt(other)); pointers.set(event.pointerId, event); }
      dragged = 99;
    } else if (moved) {
      dragged += Math.abs(moved);
      pan(-moved * perPixel);
      pointers.set(event.pointerId, event);
    }
  });
  const lift = (event) => {
    if (pointers.delete(event.pointerId) && event.type === "pointerup" && dragged < 4) {
      const m = momentAt(event);
      pinned = !(pinned && m === cursor);
      cursor = m;
      drawCursor();
    }
  };
  chart.addEventListener("pointerup", lift);
  chart.addEventListener("pointercancel", lift);
  chart.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX / 500) * (to - from));
    else zoom(event.deltaY < 0 ? 0.8 : 1.25, placeAt(event));
  }, { passive: false });
  chart.addEventListener("dblclick", whole);
  chart.addEventListener("keydown", (event) => {
    const by = event.shiftKey ? 10 : 1;
    const keys = {
      ArrowLeft: () => move(cursor - by), ArrowRight: () => move(cursor + by),
      Home: () => move(0), End: () => move(count - 1), "+": () => zoom(0.5, cursor + 0.5), "=": () => zoom(0.5, cursor + 0.5),
      "-": () => zoom(2, cursor + 0.5), 0: whole, p: toPeak,
    };
    if (keys[event.key] && !event.ctrlKey && !event.metaKey) { event.preventDefault(); keys[event.key](); }
  });
  $("closer").addEventListener("click", () => zoom(0.5, cursor + 0.5));
  $("farther").addEventListener("click", () => zoom(2, cursor + 0.5));
  $("whole").addEventListener("click", whole);
  $("to-peak").addEventListener("click", toPeak);
  $("overlay").addEventListener("change", drawChart);
  $("search").addEventListener("input", search);
  $("choice").addEventListener("input", () => show(Number($("choice").value)));
  frontier.addEventListener("click", (event) => {
    const point = event.target.closest("a[data-plan]");
    if (!point) return;
    event.preventDefault();
    show(Number(point.dataset.plan));
    $("choice").focus();
  });
  const flip = (key) => { if (!opened.delete(key)) opened.add(key); drawTree(); };
  $("tree").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.dataset.open) flip(button.dataset.open);
    else markParts(button.closest("tr").dataset.key, button.textContent, button.dataset.parts.split(" ").map(Number));
  });
  $("tree").addEventListener("keydown", (event) => {
    const row = event.target.closest("tr"), open = row && row.querySelector("[data-open]");
    if (!row || !row.dataset.key) return;
    const is_open = open && open.getAttribute("aria-expanded") === "true";
    const keys = {
      ArrowDown: () => row.nextElementSibling, ArrowUp: () => row.previousElementSibling,
      ArrowRight: () => { if (open && !is_open) flip(row.dataset.key); },
      ArrowLeft: () => { if (is_open) flip(row.dataset.key); },
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    const next = keys[event.key]();
    if (next) next.querySelector(".name").focus();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { $("search").value = ""; pinned = false; search(); return; }
    if (event.target.matches("input, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    const keys = {
      "/": () => $("search").focus(), o: () => $("overlay").click(),
      "[": () => show(plan - 1), "]": () => show(plan + 1),
    };
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
  $("copy").addEventListener("click", async () => {
    await navigator.clipboard.writeText($("apply").querySelector("code").textContent);
    $("copied").textContent = "Copied.";
  });
  $("download").addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([plans[plan].plan], { type: "application/json" }));
    link.download = "plan.json";
    link.click();
    URL.revokeObjectURL(link.href);
  });

  // Start.
  const legend = document.querySelector(".legend");
  legend.id = "legend-live";
  for (const place of document.querySelectorAll(".slider, .tools, #help, #tensors")) place.hidden = false;
  const asked = () => {
    const number = /^#plan-(\d+)$/.exec(location.hash);
    return number && Number(number[1]) < plans.length ? Number(number[1]) : found.chosen;
  };
  window.addEventListener("hashchange", () => show(asked()));
  let width = 0;
  new ResizeObserver(() => {
    if ($("memory").clientWidth === width) return;
    width = $("memory").clientWidth;
    requestAnimationFrame(() => { drawFrontier(); drawChart(); });
  }).observe($("memory"));
  show(asked());
  document.documentElement.dataset.ready = "yes";
})();
