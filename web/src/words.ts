// Labels and closed sets in two languages. Sentences, names and numbers come from Python and stay as they are.
import type { AxisPart, Pattern } from "./data.ts";
import { real } from "./data.ts";
import { error, value } from "./format.ts";

export type Language = "en" | "zh";

const EN = {
  "kind.compare": "comparison", "kind.precheck": "precheck", "kind.audit": "audit", "kind.online": "online compare",
  "kind.overflow": "overflow", "kind.run": "run",
  DIVERGED: "DIVERGED", AGREES: "AGREES", UNFINISHED: "UNFINISHED", "CANNOT TELL": "CANNOT TELL", "CANNOT COMPARE": "CANNOT COMPARE", PASSED: "PASSED", FAILED: "FAILED",
  "CANNOT CHECK": "CANNOT CHECK", FINITE: "FINITE", "NOT FINITE": "NOT FINITE", RUN: "RUN", DAMAGED: "DAMAGED",
  "FIRST NAN": "FIRST NAN", "FIRST INF": "FIRST INF", "FIRST SATURATION": "FIRST SATURATION", "FIRST OVERFLOW": "FIRST OVERFLOW",
  "NOTHING COMPARED": "NOTHING COMPARED",
  introduced: "introduced", entered: "entered", inherited: "inherited", amplified: "amplified", structural: "different call", agrees: "agrees",
  unmeasured: "unmeasured", not_judged: "not judged", in_regions: "in regions", only_baseline: "only in baseline", only_candidate: "only in candidate",
  skipped: "skipped", pass: "pass", fail: "fail", skip: "skipped", near: "near the limit", nonfinite: "NaN or inf", arrival: "came in",
  finite: "finite", not_finite: "NaN or inf", unrecorded: "not recorded", shape: "shape", dtype: "dtype", arguments: "arguments", slots: "tensors", received: "gradient received", raised: "exception",
  compared: "agree", failed: "fail", filtered: "filtered", unsampled: "not sampled", broken: "tool failed", loss: "loses precision", note: "note",
  recorded: "recorded", region: "region", reason: "not checked",
  error: "Error", inputs: "Inputs", proof: "Proof", pattern: "Pattern", where: "Where", allowed: "allowed", beyond: "beyond what is allowed",
  identical: "agree exactly", agree: "agree within noise", diverge: "diverge", unknown: "not recorded",
  inputs_identical: "The error arises in this call.", inputs_agree: "The error arises in this call.",
  inputs_diverge: "The error came in with them.", inputs_unknown: "Nothing is known of them.",
  proof_candidate: "the candidate is wrong", proof_baseline: "the baseline is wrong", proof_both: "both sides are wrong",
  proof_none: "both are within rounding", proof_missing: "not replayed", proof_how: "each side recomputed in float64 from its own inputs",
  baseline: "baseline", candidate: "candidate", difference: "difference", run: "run", device: "device", reference: "reference",
  pattern_none: "no pattern: the elements that differ have nothing in common", pattern_missing: "not looked at",
  first_at: "first at", in_module: "in", step: "step", rank: "rank", calls: "calls", rows: "tensors", of: "of",
  why: "Why and where", execution: "Error over execution", execution_run: "Values over execution", matrix: "Ranks × steps",
  table: "Modules and calls", selected: "The call", neighbourhood: "Neighbourhood", tensors: "Tensors", structure: "Findings", rest: "Coverage and notes",
  source: "Source", stack: "Stack", same_stack: "the same in both runs", stack_baseline: "Stack in the baseline", stack_candidate: "Stack in the candidate",
  arguments_of: "Arguments", same_arguments: "the same in both runs", no_source: "Lines of the program are not in this page.",
 
  copy: "Copy", copied: "Copied", "cmd.look": "Look at its tensors", "cmd.replay": "Replay this call alone", "cmd.view": "Open with full tensors",
  "cmd.inspect": "Look at the call", "cmd.script": "Run it again",
  theme: "Theme", theme_auto: "system", theme_light: "light", theme_dark: "dark", language: "中文",
  forward: "forward", backward: "backward", band: "within what is allowed", zero: "equal", infinite: "NaN/inf", nonfinite_places: "NaN/inf on one side only",
  chart_help: "Drag to choose calls; everything below follows. Click a call to select it; arrow keys move.",
  chart_label: "Error of each call in execution order", clear: "clear", all_ranks: "rank",
  matrix_help: "Each cell is one rank in one step, coloured by the worst that happened. Click to filter.",
  filter: "Filter: name, module, slot, dtype", regex: "regex", regex_bad: "not a valid expression", columns: "Columns",
  outputs_only: "outputs", worst_first: "worst first", nonfinite_only: "NaN/inf", unmatched: "unmatched", reset: "reset",
  shown: "shown", none_fit: "No tensor fits the filter.", modules: "Modules", all_modules: "all modules",
  made_by: "made by", used_by: "used by", show_more: "show more", cut: "more calls are connected than are shown",
  alone: "Nothing is known of the calls around it.", no_tensors: "This page has no pictures of the tensors of this call.",
  no_tensors_hint: "It keeps those of the calls where the runs part. For every other call:",
  picture: "Picture", hover_cell: "Point at a cell to read its values.", cells: "Each cell is the element that differs most among",
  elements: "elements", values_of: "Values", differences_of: "Differences (signed, logarithmic)", ulps_of: "Distance in ULP",
  along: "Greatest difference along", worst_elements: "Worst elements", index: "index", sampled: "sampled", loading: "Loading…",
  slice: "Slice", whole: "whole tensor",
  unmatched_of: "Calls without a partner, other arguments and shapes", nearest: "nearest", more_items: "more are in the result",
  before: "Before the first call", notes: "Notes", made_with: "Made with tensorprobe", offline: "This file makes no connection.",
  changed: "The result has changed. The page is loaded again.",
 
  "col.call": "call", "col.candidate": "candidate call", "col.slot": "tensor", "col.module": "module", "col.step": "step", "col.rank": "rank",
  "col.index": "line", "col.status": "status", "col.direction": "direction", "col.level": "level", "col.dtype": "dtype", "col.shape": "shape",
  "col.side": "side", "col.verdict": "verdict", "col.judged_by": "decided by", "col.basis": "measured from", "col.measured": "measured",
  "col.allowed": "allowed", "col.ratio": "× allowed", "col.max_abs": "max |Δ|", "col.relative_l2": "relative L2", "col.max_rel": "max rel.",
  "col.one_minus_cosine": "1 − cosine", "col.ulp_max": "max ULP", "col.different": "differ", "col.nonfinite_different": "NaN/inf differ",
  "col.max": "max", "col.min": "min", "col.mean": "mean", "col.norm": "norm", "col.nan": "NaN", "col.inf": "inf", "col.own": "CPU's own", "col.message": "message",
  "col.nbytes": "bytes", "col.count": "elements",
};

const ZH: Partial<typeof EN> = {
  "kind.compare": "对比", "kind.precheck": "预检", "kind.audit": "审计", "kind.online": "在线对比", "kind.overflow": "溢出检测", "kind.run": "运行记录",
  DIVERGED: "存在分歧", AGREES: "一致", UNFINISHED: "未完成", "CANNOT TELL": "无法判断", "CANNOT COMPARE": "无法比较", PASSED: "通过", FAILED: "未通过", "CANNOT CHECK": "无法检查",
  FINITE: "均为有限值", "NOT FINITE": "存在非有限值", RUN: "运行记录", DAMAGED: "文件损坏", "FIRST NAN": "首个 NaN", "FIRST INF": "首个 inf",
  "FIRST SATURATION": "首次饱和", "FIRST OVERFLOW": "首次溢出", "NOTHING COMPARED": "没有可比较的调用",
  introduced: "引入误差", entered: "由输入带入", inherited: "继承误差", amplified: "放大误差", structural: "调用不同", agrees: "一致", unmeasured: "未测量",
  not_judged: "未判定", in_regions: "在区域内", only_baseline: "仅基准有", only_candidate: "仅待测有", skipped: "跳过", pass: "通过", fail: "未通过", skip: "跳过",
  near: "接近上限", nonfinite: "NaN 或 inf", arrival: "外部传入", finite: "有限", not_finite: "NaN 或 inf", unrecorded: "未记录", shape: "形状", dtype: "数据类型",
  arguments: "参数", slots: "张量", received: "接收的梯度", raised: "异常", compared: "一致", failed: "未通过", filtered: "已过滤", unsampled: "未采样", broken: "工具出错",
  loss: "精度损失", note: "说明", recorded: "已记录", region: "区域", reason: "未检查",
  error: "误差", inputs: "输入", proof: "证明", pattern: "分布规律", where: "位置", allowed: "允许", beyond: "超出允许范围",
  identical: "完全一致", agree: "在噪声范围内一致", diverge: "不一致", unknown: "未记录",
  inputs_identical: "误差由该调用产生。", inputs_agree: "误差由该调用产生。", inputs_diverge: "误差随输入传入。", inputs_unknown: "输入情况未知。",
  proof_candidate: "待测一侧有误", proof_baseline: "基准一侧有误", proof_both: "两侧均有误", proof_none: "两侧均在舍入范围内",
  proof_missing: "未重放", proof_how: "两侧各自用记录的输入以 float64 重算",
  baseline: "基准", candidate: "待测", difference: "差值", run: "运行", device: "设备", reference: "参考",
  pattern_none: "无规律：不同的元素没有共同点", pattern_missing: "未分析",
  first_at: "首个位置", in_module: "位于", step: "步", rank: "rank", calls: "个调用", rows: "个张量", of: "/",
  why: "原因与位置", execution: "执行过程中的误差", execution_run: "执行过程中的数值", matrix: "rank × 步", table: "模块与调用", selected: "所选调用",
  neighbourhood: "上下游", tensors: "张量", structure: "发现", rest: "覆盖范围与说明",
  source: "源代码", stack: "调用栈", same_stack: "两次运行相同", stack_baseline: "基准的调用栈", stack_candidate: "待测的调用栈",
  arguments_of: "参数", same_arguments: "两次运行相同", no_source: "本页不含源代码。",
  copy: "复制", copied: "已复制", "cmd.look": "查看张量", "cmd.replay": "单独重放该调用", "cmd.view": "查看完整张量", "cmd.inspect": "查看该调用",
  "cmd.script": "再次运行",
  theme: "主题", theme_auto: "跟随系统", theme_light: "浅色", theme_dark: "深色", language: "EN",
  forward: "前向", backward: "反向", band: "允许范围内", zero: "相等", infinite: "NaN/inf", nonfinite_places: "处仅一侧为 NaN/inf",
  chart_help: "拖动选择一段调用，下方随之过滤；点击选中调用，方向键移动。", chart_label: "按执行顺序的各调用误差", clear: "清除", all_ranks: "rank",
  matrix_help: "每格为一个 rank 的一步，颜色为其中最严重的状态。点击可过滤。",
  filter: "过滤：名称、模块、张量、类型", regex: "正则", regex_bad: "表达式无效", columns: "列", outputs_only: "仅输出", worst_first: "误差最大优先",
  nonfinite_only: "NaN/inf", unmatched: "未配对", reset: "重置", shown: "条", none_fit: "没有符合条件的张量。", modules: "模块", all_modules: "全部模块",
  made_by: "上游", used_by: "下游", show_more: "显示更多", cut: "还有更多相连的调用未显示", alone: "没有该调用上下游的信息。",
  no_tensors: "本页没有该调用的张量图像。", no_tensors_hint: "本页只保留分歧处的张量。查看其他调用：",
  picture: "图像", hover_cell: "将指针移到格子上读取数值。", cells: "每格显示差异最大的元素，每格包含", elements: "个元素",
  values_of: "数值分布", differences_of: "差值分布（带符号对数）", ulps_of: "ULP 距离分布", along: "沿轴的最大差值", worst_elements: "差异最大的元素",
  index: "下标", sampled: "采样", loading: "加载中…", slice: "切片", whole: "整个张量",
  unmatched_of: "未配对的调用、不同的参数与形状", nearest: "最接近", more_items: "条见结果文件", before: "首个调用之前",
  notes: "说明", made_with: "由 tensorprobe 生成", offline: "本文件不进行任何网络连接。",
  changed: "结果已更新，页面将重新加载。",
  "col.call": "调用", "col.candidate": "待测中的调用", "col.slot": "张量", "col.module": "模块", "col.step": "步", "col.rank": "rank", "col.index": "行",
  "col.status": "状态", "col.direction": "方向", "col.level": "级别", "col.dtype": "类型", "col.shape": "形状", "col.side": "输入/输出",
  "col.verdict": "判定", "col.judged_by": "判定依据", "col.basis": "测量方式", "col.measured": "测得", "col.allowed": "允许", "col.ratio": "× 允许",
  "col.max_abs": "最大 |Δ|", "col.relative_l2": "相对 L2", "col.max_rel": "最大相对", "col.one_minus_cosine": "1 − 余弦", "col.ulp_max": "最大 ULP",
  "col.different": "不同元素", "col.nonfinite_different": "NaN/inf 不同", "col.max": "最大", "col.min": "最小", "col.nan": "NaN", "col.inf": "inf", "col.mean": "均值", "col.norm": "范数",
  "col.own": "CPU 自身误差", "col.message": "说明", "col.nbytes": "字节", "col.count": "元素数",
};

export type Key = keyof typeof EN;
export type Say = (key: string) => string;

export const say = (language: Language): Say => (key) => {
  const known = EN as Record<string, string>;
  return (language === "zh" ? (ZH as Record<string, string>)[key] : undefined) ?? known[key] ?? key.replace(/^col\./, "").replaceAll("_", " ");
};

export const missingWords = (): string[] => Object.keys(EN).filter((key) => !(key in ZH));

const AXES: Record<string, string> = {
  columns: "列", rows: "行", heads: "头", batches: "批", channels: "通道", images: "图", elements: "元素", parts: "实/虚部",
};

/** The pattern in Chinese; the English sentence comes from Python. */
export function patternZh(pattern: Pattern): string {
  const effects: Record<string, string> = {
    zero: "待测为 0", nan: "待测为 NaN", inf: "待测为无穷", sign: "待测符号相反", transposed: "待测的最后两轴被转置",
    scale: `待测为基准的 ${value(real(pattern.value))} 倍`, bias: `待测为基准加 ${value(real(pattern.value))}`,
    constant: `待测处处为 ${value(real(pattern.value))}`, rounded: `待测只有 ${pattern.value} 位尾数`,
    shift: `沿${axis(pattern.axis_name)}（轴 ${pattern.axis}）移位 ${pattern.by[0]}`,
    swap: `${axis(pattern.axis_name)} ${pattern.by[0]} 与 ${pattern.by[1]}（轴 ${pattern.axis}）互换`,
  };
  const effect = effects[pattern.effect] ?? "";
  const others = real(pattern.others) > 0 ? `（其余元素相差不超过 ${error(real(pattern.others))}）` : "";
  if (pattern.elements.length) return `仅 ${pattern.elements.length} 个元素：${pattern.elements.map((at) => `[${at.join(", ")}]`).join("、")}${effect && `，${effect}`}${others}`;
  const limited = pattern.axes.filter((part) => part.extent !== "all");
  if (["shift", "swap", "transposed"].includes(pattern.effect)) return effect;
  if (!limited.length) return `所有元素：${effect}`;
  const rest = pattern.axes.filter((part) => part.extent === "all").map((part) => axis(part.name));
  return `仅${limited.map(partZh).join("、")}${rest.length ? `，所有${rest.join("、")}` : ""}${effect && `：${effect}`}${others}`;
}

const axis = (name: string): string => AXES[name] ?? name.replace(/^axis-(\d+) slices$/, "轴 $1 ");

function partZh(part: AxisPart): string {
  const name = axis(part.name);
  switch (part.extent) {
    case "one": return `第 ${part.first} ${name}`;
    case "head": return `前 ${part.count} ${name}（${part.first}-${part.last}）`;
    case "tail": return `最后 ${part.count} ${name}（${part.first}-${part.last}）`;
    case "range": return `第 ${part.first}-${part.last} ${name}`;
    case "every": return `从 ${part.first} 起每 ${part.period} ${name}中的一${name}`;
    case "blocks": return `每 ${part.period} ${name}中的第 ${part.first}-${part.last} ${name}`;
    default: return part.listed.length ? `${name} ${part.listed.join("、")}` : `${part.size} ${name}中的 ${part.count} ${name}`;
  }
}
