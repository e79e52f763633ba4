// The page: reads its data from the document, and from its server if it has one. It shows what Python decided, and judges nothing.
import { render } from "preact";
import { useCallback, useEffect, useMemo, useRef, useState } from "preact/hooks";
import { Around } from "./around.tsx";
import { Chart, ranksOf } from "./chart.tsx";
import { unpackCalls, wordAt, type Calls, type PackedColumn, type PackedTable, type Page } from "./data.ts";
import { EVERYTHING, type Query } from "./filter.ts";
import { Matrix } from "./matrix.tsx";
import { Modules } from "./modules.tsx";
import { Rest, Structure } from "./rest.tsx";
import { ask, localRows, remoteRows, type ColumnKind, type RowSource } from "./rows.ts";
import { markReady, State, useShared, type Shared } from "./state.tsx";
import { Calls as CallTable } from "./table.tsx";
import { Tensors } from "./tensor.tsx";
import { Verdict } from "./verdict.tsx";
import { CallDetail, findEvidence, Why } from "./why.tsx";
import { say, type Language } from "./words.ts";

type Theme = "auto" | "light" | "dark";
const THEMES: Theme[] = ["auto", "light", "dark"];

function stored(key: string): string | null {
  try {
    return localStorage.getItem(key);
  } catch {
    return null; // a page from a file may have no storage
  }
}

function store(key: string, value: string): void {
  try {
    localStorage.setItem(key, value);
  } catch {
    // it lasts until the page is closed, then
  }
}

function useTheme(): [Theme, (theme: Theme) => void, boolean] {
  const [theme, setTheme] = useState<Theme>((stored("tensorprobe-theme") as Theme | null) ?? "auto");
  const system = useMemo(() => matchMedia("(prefers-color-scheme: dark)"), []);
  const paper = useMemo(() => matchMedia("print"), []);
  const [dark, setDark] = useState(system.matches);
  useEffect(() => {
    const change = (): void => {
      const now = !paper.matches && (theme === "dark" || (theme === "auto" && system.matches));
      document.documentElement.dataset.theme = now ? "dark" : "light";
      setDark(now);
    };
    change();
    store("tensorprobe-theme", theme);
    for (const query of [system, paper]) query.addEventListener("change", change);
    return () => { for (const query of [system, paper]) query.removeEventListener("change", change); };
  }, [theme]);
  return [theme, setTheme, dark];
}

function useCalls(page: Page, rank: number): { calls: Calls | null; failed: string } {
  const [calls, setCalls] = useState<Calls | null>(null);
  const [failed, setFailed] = useState("");
  useEffect(() => {
    let current = true;
    const load = page.calls
      ? unpackCalls(page.calls, page.producers)
      : page.server
        ? ask<{ calls: PackedTable; producers: PackedColumn }>("calls", { rank }).then((held) => unpackCalls(held.calls, held.producers))
        : null;
    load?.then((held) => current && setCalls(held)).catch((failure: Error) => current && setFailed(failure.message));
    return () => { current = false; };
  }, [page, page.calls ? 0 : rank]);
  return { calls, failed };
}

function useRows(page: Page, calls: Calls | null): RowSource | null {
  const latest = useRef(calls);
  latest.current = calls;
  const [remote, setRemote] = useState<RowSource | null>(null);
  useEffect(() => {
    if (!page.rows && page.server)
      void ask<{ total: number; columns: ColumnKind[] }>("columns", {}).then(({ total, columns }) => setRemote(remoteRows(total, columns, () => latest.current)));
  }, [page]);
  const local = useMemo(() => (page.rows && calls ? localRows(page.rows, calls, page.statuses) : null), [page, calls]);
  return local ?? remote;
}

/** Loads the page again when the result has changed on disk. */
function useReload(page: Page): boolean {
  const [changed, setChanged] = useState(false);
  useEffect(() => {
    if (!page.server) return;
    let known = "";
    const timer = setInterval(() => {
      void ask<{ version: string }>("version", {}).then(({ version }) => {
        if (known && version !== known) {
          setChanged(true);
          setTimeout(() => location.reload(), 800);
        }
        known = version;
      }).catch(() => undefined);
    }, 2000);
    return () => clearInterval(timer);
  }, [page]);
  return changed;
}

function App({ page }: { page: Page }) {
  const [language, setLanguage] = useState<Language>((stored("tensorprobe-language") as Language | null) ?? (navigator.language.startsWith("zh") ? "zh" : "en"));
  const [theme, setTheme, dark] = useTheme();
  const [rank, setRank] = useState(page.first?.rank ?? page.matrix?.ranks[0] ?? -1);
  const { calls, failed } = useCalls(page, rank);
  const rows = useRows(page, calls);
  const changed = useReload(page);
  const [query, change] = useState<Query>(EVERYTHING);
  const [choice, setChoice] = useState<{ call: number; slot: string }>({ call: page.selected, slot: page.first?.slot ?? "" });
  const t = useMemo(() => say(language), [language]);
  useEffect(() => {
    document.documentElement.lang = language;
    document.title = `${t(page.verdict.headline.replace(/:$/, ""))} · ${page.title} · tensorprobe`;
    store("tensorprobe-language", language);
  }, [language]);
  useEffect(() => {
    if (!calls) return;
    const held = ranksOf(calls);
    if (held.length && !held.includes(rank)) setRank(held[0]);
    if (page.selected < 0 && page.first && choice.call < 0) {
      for (let call = 0; call < calls.count; call++)
        if (calls.index[call] === page.first.index && calls.step[call] === page.first.step && calls.rank[call] === page.first.rank) setChoice({ call, slot: page.first.slot });
    }
  }, [calls]);
  const select = useCallback((call: number, slot = "") => setChoice({ call, slot }), []);
  const shared: Shared = {
    page, calls, rows, language, t, dark, query, rank,
    setQuery: (part) => change((held) => (part === EVERYTHING ? EVERYTHING : { ...held, ...part })),
    selected: choice.call, slot: choice.slot, select,
    setRank: (next) => { setRank(next); change((held) => ({ ...held, range: null })); },
  };
  const several = calls !== null && calls.count > 0;
  useEffect(() => { if (!page.server && (!page.calls || !page.calls.count)) markReady(); }, []);
  return (
    <State.Provider value={shared}>
      <header class="bar">
        <b>tensorprobe</b><span class="muted">{t(`kind.${page.kind}`)}</span><span class="name title">{page.title}</span>
        <button type="button" onClick={() => setLanguage(language === "en" ? "zh" : "en")} lang={language === "en" ? "zh" : "en"}>{t("language")}</button>
        <button type="button" onClick={() => setTheme(THEMES[(THEMES.indexOf(theme) + 1) % 3])}>{t("theme")}: {t(`theme_${theme}`)}</button>
      </header>
      <main>
        {changed && <p class="banner" role="alert">{t("changed")}</p>}
        {failed && <p class="banner" role="alert">{failed}</p>}
        <Verdict />
        <Why />
        {several && page.measure && <Chart />}
        <Matrix />
        {several && rows && (
          <section aria-labelledby="table">
            <h2 id="table">{t("table")}</h2>
            <div class="split">
              <Modules />
              <CallTable />
            </div>
          </section>
        )}
        {several && choice.call >= 0 && choice.call < calls.count && <Selected />}
        <Structure />
        <Rest />
      </main>
      <footer>{t("made_with")} {page.tool}. {!page.server && t("offline")}</footer>
    </State.Provider>
  );
}

function Selected() {
  const { page, calls, selected, t } = useShared();
  const held = calls!;
  const first = page.first;
  const place = [held.step[selected], held.rank[selected], held.index[selected]] as const;
  const isFirst = first !== null && first.step === place[0] && first.rank === place[1] && first.index === place[2];
  const at = findEvidence(page.evidence, place);
  const comparing = page.kind === "compare"; // no other kind knows of producers, or has two tensors to show
  if (!comparing && (isFirst || at < 0)) return null;
  return (
    <section id="selected" aria-labelledby="selected-title">
      <h2 id="selected-title">{t("selected")} <span class="name">{wordAt(held.name, selected)}</span> <span class="muted name">{wordAt(held.module, selected)}</span></h2>
      {!isFirst && at >= 0 && <CallDetail evidence={page.evidence[at]} />}
      {comparing && <Around />}
      {comparing && <Tensors />}
    </section>
  );
}

const data = JSON.parse(document.getElementById("data")!.textContent || "{}") as Page;
const root = document.getElementById("app")!;
root.textContent = "";
if (data.verdict) render(<App page={data} />, root);
else root.textContent = "This is the template of tensorprobe's page. It holds no result.";
