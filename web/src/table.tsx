// The table of tensors. Only the rows in view are in the document.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { count, error, number, times } from "./format.ts";
import { EVERYTHING } from "./filter.ts";
import { findCall, type ColumnKind, type Found, type Row } from "./rows.ts";
import { markReady, statusColour, useShared } from "./state.tsx";

const ROW = 27; // pixels; as in style.css
const VIEW = 16; // rows
const SPARE = 8;
const MOST_PIXELS = 8_000_000; // browsers cut elements that are much higher
const SHOWN: Record<string, string[]> = {
  compare: ["call", "slot", "module", "shape", "dtype", "relative_l2", "max_abs", "ratio"],
  run: ["call", "slot", "module", "shape", "dtype", "max", "min", "mean", "norm", "nan", "inf"],
  overflow: ["call", "slot", "module", "shape", "dtype", "nan", "inf", "message"],
};
const CHECKED = ["call", "slot", "module", "shape", "dtype", "relative_l2", "max_abs", "ratio", "message"];
const WIDTHS: Record<string, [pixels: number, share: number]> = {
  call: [215, 2], candidate: [200, 1.5], module: [120, 1.1], slot: [66, 0.2], shape: [92, 0.6], dtype: [56, 0.1], message: [200, 2], status: [92, 0], step: [38, 0], rank: [38, 0], index: [56, 0],
};
const GAP = 10;

export function Calls() {
  const { page, rows } = useShared();
  const [columns, setColumns] = useState<string[]>(() => {
    const wanted = SHOWN[page.kind] ?? CHECKED;
    const several = page.matrix ? [...(page.matrix.steps.length > 1 ? ["step"] : []), ...(page.matrix.ranks.length > 1 ? ["rank"] : [])] : [];
    return [...several, ...wanted.filter((id) => rows!.columns.some((column) => column.id === id))];
  });
  const kinds = columns.map((id) => rows!.columns.find((column) => column.id === id)!).filter(Boolean);
  return (
    <div class="calls">
      <Filter columns={columns} setColumns={setColumns} />
      <Grid kinds={kinds} />
      {page.left_out && <p class="small muted">{page.left_out}</p>}
    </div>
  );
}

function Filter({ columns, setColumns }: { columns: string[]; setColumns: (columns: string[]) => void }) {
  const { page, t, query, setQuery, rows } = useShared();
  const [text, setText] = useState(query.text);
  const timer = useRef(0);
  const type = (typed: string): void => {
    setText(typed);
    clearTimeout(timer.current);
    timer.current = window.setTimeout(() => setQuery({ text: typed }), rows!.total > 200_000 ? 150 : 0);
  };
  useEffect(() => { if (query === EVERYTHING) setText(""); }, [query]); // what is typed meanwhile is not overwritten
  const chip = (label: string, on: boolean, press: () => void, ink?: string, extra = "") => (
    <button type="button" class="chip" aria-pressed={on} onClick={press}>{ink && <i class="dot" style={{ background: ink }} />}{label}{extra && <span class="muted">{extra}</span>}</button>
  );
  const has = (id: string): boolean => rows!.columns.some((column) => column.id === id);
  const worst = has("ratio") ? "ratio" : has("relative_l2") ? "relative_l2" : "max";
  const unmatched = (page.counts.only_baseline ?? 0) + (page.counts.only_candidate ?? 0);
  return (
    <div class="filter" role="search">
      <input type="search" value={text} placeholder={t("filter")} aria-label={t("filter")} spellcheck={false} onInput={(event) => type(event.currentTarget.value)} />
      {chip(".*", query.regex, () => setQuery({ regex: !query.regex }))}
      {page.statuses.map((status, code) => [status, code] as const).reverse().filter(([status]) => page.counts[status] && status !== "agrees" && status !== "pass" && status !== "finite").map(([status, code]) =>
        chip(t(status), query.statuses.includes(code), () => setQuery({ statuses: query.statuses.includes(code) ? query.statuses.filter((each) => each !== code) : [...query.statuses, code] }), statusColour(status), ` ${count(page.counts[status])}`))}
      {has("side") && chip(t("outputs_only"), query.outputs, () => setQuery({ outputs: !query.outputs }))}
      {has("nonfinite_different") && chip(t("nonfinite_only"), query.nonfinite, () => setQuery({ nonfinite: !query.nonfinite }))}
      {chip(t("worst_first"), query.sort === worst && query.descending, () => setQuery(query.sort === worst ? { sort: "" } : { sort: worst, descending: true }))}
      {unmatched > 0 && <a class="chip" href="#structure">{t("unmatched")} <span class="muted">{count(unmatched)}</span></a>}
      {query.module && <button type="button" class="chip" aria-pressed="true" onClick={() => setQuery({ module: "" })}><span class="name">{query.module}</span> ✕</button>}
      {query !== EVERYTHING && <button type="button" class="ghost" onClick={() => setQuery(EVERYTHING)}>{t("reset")}</button>}
      <details class="columns">
        <summary>{t("columns")}</summary>
        <div class="choices">
          {rows!.columns.map(({ id }) => (
            <label><input type="checkbox" checked={columns.includes(id)} onChange={() => setColumns(columns.includes(id) ? columns.filter((each) => each !== id) : rows!.columns.map((column) => column.id).filter((each) => each === id || columns.includes(each)))} />{t(`col.${id}`)}</label>
          ))}
        </div>
      </details>
    </div>
  );
}

function shown(id: string, kind: ColumnKind, given: string | number | undefined, t: (key: string) => string): string {
  if (given === undefined) return "";
  if (kind.kind === "word") return id === "status" || id === "verdict" || id === "direction" ? t(String(given)) : String(given);
  const held = Number(given);
  if (kind.kind === "integer") return count(held);
  if (kind.form === "ratio2") return Number.isNaN(held) ? "–" : held === 0 ? "0" : held < 1 ? held.toPrecision(2) : times(held).slice(0, -1) || "inf";
  return kind.form ? number(held, kind.form) : error(held);
}

function Grid({ kinds }: { kinds: ColumnKind[] }) {
  const { page, t, query, setQuery, rows, calls, selected, slot, select } = useShared();
  const [found, setFound] = useState<Found | null>(null);
  const [bad, setBad] = useState(false);
  const [top, setTop] = useState(0);
  const [fetched, setFetched] = useState<{ of: Found | null; from: number; rows: Row[] }>({ of: null, from: 0, rows: [] });
  const [active, setActive] = useState(-1);
  const box = useRef<HTMLDivElement>(null);
  const asked = useRef(0);

  useEffect(() => {
    let current = true;
    void rows!.find(query).then((next) => {
      if (!current) return;
      setBad(next === null);
      if (next !== null) setFound(next);
    });
    return () => { current = false; };
  }, [rows, query]);

  const total = found?.count ?? 0;
  const pixels = Math.min(total * ROW, MOST_PIXELS);
  const room = Math.min(VIEW, Math.max(total, 1)) * ROW;
  const perPixel = total * ROW > MOST_PIXELS ? (total - VIEW) / (pixels - room) : 1 / ROW;
  const first = Math.max(0, Math.min(total - 1, Math.floor(top * perPixel)));
  const from = Math.max(0, first - SPARE), to = Math.min(total, first + VIEW + SPARE);

  const ids = kinds.map(({ id }) => id);
  const now = useMemo(() => found?.now(from, to, ids) ?? null, [found, from, to, ids.join()]);
  useEffect(() => {
    if (found === null || now !== null) {
      if (now !== null) requestAnimationFrame(markReady);
      return;
    }
    const mine = ++asked.current;
    void found.page(from, to, ids).then((read) => {
      if (mine === asked.current) setFetched({ of: found, from, rows: read });
      requestAnimationFrame(markReady);
    });
  }, [found, from, to, now, ids.join()]);
  const held = now !== null ? { from, rows: now } : fetched.of === found ? fetched : { from, rows: [] }; // never rows of another query

  const goTo = (at: number, center = false): void => {
    const element = box.current;
    if (!element || at < 0) return;
    const target = at / perPixel;
    const low = element.scrollTop, high = low + room - ROW;
    if (center) element.scrollTop = Math.max(0, target - room / 3);
    else if (target < low) element.scrollTop = target;
    else if (target > high) element.scrollTop = target - room + ROW;
  };

  useEffect(() => {
    if (found === null || selected < 0 || !calls) return;
    let current = true;
    void found.positionOf([calls.step[selected], calls.rank[selected], calls.index[selected]], slot).then((at) => {
      if (!current || at < 0 || at === active) return;
      setActive(at);
      goTo(at, true);
    });
    return () => { current = false; };
  }, [found, selected, slot]);

  const pick = (at: number, row: Row | undefined): void => {
    setActive(at);
    if (row && calls) select(findCall(calls, ...row.place), String(row.cells.slot ?? ""));
  };
  const key = (event: KeyboardEvent): void => {
    const steps: Record<string, number> = { ArrowDown: 1, ArrowUp: -1, PageDown: VIEW - 1, PageUp: 1 - VIEW, Home: -Infinity, End: Infinity };
    if (event.key === "Enter") document.getElementById("selected")?.scrollIntoView({ behavior: "smooth" });
    if (!(event.key in steps) || !total) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(total - 1, Math.max(active, 0) + steps[event.key]));
    goTo(next);
    setActive(next);
    const near = held.rows[next - held.from];
    if (near) pick(next, near);
    else void found!.page(next, next + 1, ids).then(([row]) => pick(next, row));
  };
  const sort = (id: string): void => setQuery(query.sort !== id ? { sort: id, descending: true } : query.descending ? { descending: false } : { sort: "", descending: true });
  const widths = kinds.map(({ id, kind }) => WIDTHS[id] ?? [kind === "word" ? 100 : 70, 0]);
  const template = `14px ${widths.map(([pixels, share]) => (share ? `minmax(${pixels}px, ${share}fr)` : `${pixels}px`)).join(" ")}`;
  const minWidth = `${widths.reduce((sum, [pixels]) => sum + pixels + GAP, 14 + 2 * GAP)}px`;
  const start = perPixel === 1 / ROW ? held.from * ROW : Math.max(0, top - (first - held.from) * ROW);
  return (
    <>
      <p class="small muted" role="status" aria-live="polite">{bad ? t("regex_bad") : `${count(total)} ${t("of")} ${count(rows!.total)} ${t("rows")}`}</p>
      <div class="grid" role="grid" aria-rowcount={total + 1} aria-colcount={kinds.length} aria-label={t("table")} tabIndex={0} onKeyDown={key}
        aria-activedescendant={active >= 0 ? `row-${active}` : undefined}>
        <div class="scroll" ref={box} style={{ height: `${room + ROW + 14}px` }} onScroll={(event) => setTop(event.currentTarget.scrollTop)}>
          <div class="head" role="row" aria-rowindex={1} style={{ gridTemplateColumns: template, minWidth }}>
            <span role="columnheader" aria-label={t("col.status")} />
            {kinds.map(({ id, kind }) => (
              <span role="columnheader" aria-sort={query.sort === id ? (query.descending ? "descending" : "ascending") : "none"}>
                <button type="button" class={kind === "word" ? "" : "right"} onClick={() => sort(id)}>{t(`col.${id}`)}{query.sort === id && (query.descending ? " ↓" : " ↑")}</button>
              </span>
            ))}
          </div>
          <div class="body" style={{ height: `${pixels}px`, minWidth }}>
            {total === 0 && found && <p class="muted">{t("none_fit")}</p>}
            <div class="rows" style={{ transform: `translateY(${start}px)` }}>
              {held.rows.map((row, at) => {
                const position = held.from + at;
                const status = page.statuses[row.status];
                return (
                  <div key={at} id={`row-${position}`} role="row" aria-rowindex={position + 2} aria-selected={position === active}
                    class={`line ${position === active ? "active" : ""} ${page.tones[row.status] === "bad" && row.cells.verdict !== "agrees" ? "strong" : ""}`} style={{ gridTemplateColumns: template }} onClick={() => pick(position, row)}>
                    <span role="gridcell" aria-label={t(status)} title={t(status)}><i class="dot" style={{ background: statusColour(status) }} /></span>
                    {kinds.map((kind) => <Cell kind={kind} row={row} />)}
                  </div>
                );
              })}
            </div>
          </div>
        </div>
      </div>
    </>
  );
}

function Cell({ kind, row }: { kind: ColumnKind; row: Row }) {
  const { t } = useShared();
  const text = shown(kind.id, kind, row.cells[kind.id], t);
  const name = kind.kind === "word" && kind.id !== "status" ? "name" : "";
  return <span role="gridcell" class={`${kind.kind === "word" ? "" : "right"} ${name}`} title={text.length > 12 ? text : undefined}>{text}</span>;
}
