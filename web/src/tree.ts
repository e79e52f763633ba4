// The modules as a tree, with the worst of what happened in each.
import type { Calls } from "./data.ts";

export interface Module {
  name: string;
  path: string;
  calls: number;
  worst: number; // status
  ratio: number; // greatest error over its limit
  error: number;
  children: Module[];
}

const node = (name: string, path: string): Module => ({ name, path, calls: 0, worst: -1, ratio: NaN, error: NaN, children: [] });

const greater = (one: number, other: number): number => (Number.isNaN(one) || other > one ? (Number.isNaN(other) ? one : other) : one);

export function moduleTree(calls: Calls, fits: Uint8Array): Module {
  const root = node("", "");
  const known = new Map<string, Module>([["", root]]);
  const paths = calls.module.words.map((path) => chain(path, known));
  for (let call = 0; call < calls.count; call++) {
    if (!fits[call]) continue;
    const ratio = calls.error[call] / calls.limit[call];
    for (const each of paths[calls.module.values[call]]) {
      each.calls++;
      each.worst = Math.max(each.worst, calls.status[call]);
      each.ratio = greater(each.ratio, ratio);
      each.error = greater(each.error, calls.error[call]);
    }
  }
  prune(root);
  return root;
}

/** The root, and every module on the way to the path; they are made when they are met. */
function chain(path: string, known: Map<string, Module>): Module[] {
  const found = [known.get("")!];
  let prefix = "";
  for (const name of path === "" ? [] : path.split(".")) {
    prefix = prefix ? `${prefix}.${name}` : name;
    let each = known.get(prefix);
    if (each === undefined) {
      each = node(name, prefix);
      known.set(prefix, each);
      found.at(-1)!.children.push(each);
    }
    found.push(each);
  }
  return found;
}

function prune(module: Module): void {
  module.children = module.children.filter((child) => child.calls > 0);
  module.children.forEach(prune);
}

/** The paths to open so that the worst call can be seen. */
export function worstPath(root: Module): Set<string> {
  const open = new Set<string>([""]);
  for (let each: Module | undefined = root; each; ) {
    open.add(each.path);
    const worst: number = each.worst;
    each = each.children.find((child) => child.worst === worst);
  }
  return open;
}
