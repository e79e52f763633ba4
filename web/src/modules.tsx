// The tree of modules, coloured by the worst that happened in each.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { count, times } from "./format.ts";
import { fittingCalls } from "./filter.ts";
import { statusColour, useShared } from "./state.tsx";
import { moduleTree, worstPath, type Module } from "./tree.ts";

interface Line { module: Module; depth: number }

const MOST_LINES = 2000;

function lines(module: Module, open: Set<string>, depth = 0): Line[] {
  const found: Line[] = [{ module, depth }];
  if (open.has(module.path)) for (const child of module.children) found.push(...lines(child, open, depth + 1));
  return found;
}

export function Modules() {
  const { page, calls, t, query, setQuery } = useShared();
  const tree = useMemo(() => moduleTree(calls!, fittingCalls(calls!, { ...query, module: "", text: "" })), [calls, query.range, query.rank, query.step, query.statuses]);
  const [open, setOpen] = useState<Set<string>>(() => worstPath(tree));
  const [active, setActive] = useState<string | null>(null);
  const list = useRef<HTMLUListElement>(null);
  useEffect(() => setOpen((held) => new Set([...held, ...worstPath(tree)])), [tree]);
  const shown = useMemo(() => lines(tree, open).slice(0, MOST_LINES), [tree, open]);
  const toggle = (path: string): void => setOpen((held) => { const next = new Set(held); if (!next.delete(path)) next.add(path); return next; });
  const choose = (path: string): void => setQuery({ module: query.module === path ? "" : path });
  const key = (event: KeyboardEvent): void => {
    const at = Math.max(0, shown.findIndex(({ module }) => module.path === active));
    const { module } = shown[at];
    const moves: Record<string, () => void> = {
      ArrowDown: () => setActive(shown[Math.min(at + 1, shown.length - 1)].module.path),
      ArrowUp: () => setActive(shown[Math.max(at - 1, 0)].module.path),
      ArrowRight: () => !open.has(module.path) && module.children.length ? toggle(module.path) : setActive(shown[Math.min(at + 1, shown.length - 1)].module.path),
      ArrowLeft: () => open.has(module.path) && module.path ? toggle(module.path) : setActive(module.path.split(".").slice(0, -1).join(".")),
      Enter: () => choose(module.path), " ": () => choose(module.path),
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    moves[event.key]();
  };
  useEffect(() => {
    const [box, line] = [list.current, list.current?.querySelector<HTMLElement>(".active")];
    if (!box || !line) return; // only the tree is scrolled, never the page
    if (line.offsetTop < box.scrollTop) box.scrollTop = line.offsetTop;
    else if (line.offsetTop + line.offsetHeight > box.scrollTop + box.clientHeight) box.scrollTop = line.offsetTop + line.offsetHeight - box.clientHeight;
  }, [active]);
  return (
    <ul class="tree" role="tree" aria-label={t("modules")} tabIndex={0} onKeyDown={key} ref={list} aria-activedescendant={active === null ? undefined : `module-${active}`}>
      {shown.map(({ module, depth }) => (
        <li key={module.path} id={`module-${module.path}`} role="treeitem" aria-level={depth + 1} aria-selected={query.module === module.path}
          aria-expanded={module.children.length ? open.has(module.path) : undefined}
          class={`${query.module && query.module === module.path ? "chosen" : ""} ${module.path === active ? "active" : ""}`} style={{ paddingLeft: `${depth * 14 + 4}px` }}
          onClick={() => { setActive(module.path); choose(module.path); }}>
          <button type="button" tabIndex={-1} class="twist" aria-hidden="true" disabled={!module.children.length}
            onClick={(event) => { event.stopPropagation(); toggle(module.path); }}>{module.children.length ? (open.has(module.path) ? "▾" : "▸") : ""}</button>
          <i class="dot" style={{ background: statusColour(page.statuses[module.worst]) }} />
          <span class="name">{module.name || t("all_modules")}</span>
          <span class="muted small">{module.ratio > 1 && Number.isFinite(module.ratio) ? times(module.ratio) : count(module.calls)}</span>
        </li>
      ))}
    </ul>
  );
}
