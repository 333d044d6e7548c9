// The answers of the server, written by hand after src/headwater/dashboard, which builds them.

export type Maybe = number | null;

export interface Info {
  version: string;
  runs_dir: string;
  is_export: boolean;
  exported: { run: string; rollout: string | null; time: number; contents?: string[] } | null;
  servers: string[];
  single_run: string | null;
  time: number;
}

export interface RunRow {
  name: string;
  state: string;
  state_text: string;
  step: number;
  total_steps: Maybe;
  reward: Maybe;
  eval_reward: Maybe;
  tokens_per_s: Maybe;
  staleness: Maybe;
  step_s: Maybe;
  message: string;
  started: Maybe;
  updated: Maybe;
  model: string;
  data: string;
  has_rollouts: boolean;
  reward_history: Maybe[];
}

export interface WithProblems {
  problems?: string[];
}

export interface Runs extends WithProblems {
  runs: RunRow[];
}

export interface RunDetail extends RunRow, WithProblems {
  path: string;
  run_id: string;
  version: Maybe;
  notices: string[];
  log: { time: number; level: string; message: string }[];
  error: string;
  stage: { name: string; done: number; total: number } | null;
  checkpoints: number[];
  has_trace: boolean;
  num_train: number;
  num_eval: number;
  files: Record<string, number>;
  episodes: Record<string, number>;
  oldest_groups: { uid: string; seconds: number; doing: string }[];
  summary: { key: string; text: string; first: Maybe; last: Maybe; best: Maybe }[];
  resume: string;
}

export interface Setting {
  key: string;
  value: unknown;
  text: string;
  is_default: boolean;
}

export interface Config extends WithProblems {
  file: string;
  sections: { name: string; settings: Setting[] }[];
  yaml: string;
}

export interface Diff extends WithProblems {
  left: string;
  right: string;
  differences: { key: string; left: unknown; right: unknown; text: string }[];
  num_equal: number;
}

export interface MetricKey {
  key: string;
  kind: "train" | "eval" | "warm_start";
  text: string;
  last: Maybe;
  num: number;
}

export interface Keys extends WithProblems {
  groups: { name: string; keys: MetricKey[] }[];
  num_train: number;
  num_eval: number;
  last_step: number;
}

export interface Series {
  mean: Maybe[];
  min: Maybe[] | null;
  max: Maybe[] | null;
  num_not_finite: number;
}

export interface Metrics extends WithProblems {
  kind: string;
  is_sampled: boolean;
  num: number;
  steps: number[];
  times: number[];
  series: Record<string, Series>;
  unknown: string[];
}

export interface Staleness extends WithProblems {
  steps: number[];
  lags: number[];
  shares: Maybe[][];
  last: Maybe[];
  mean: Maybe[];
  dropped_groups: Maybe[];
  masked_tokens: Maybe[];
}

export interface Stages extends WithProblems {
  steps: number[];
  stages: { name: string; text: string; seconds: Maybe[] }[];
  step_s: Maybe[];
  generate_s: Maybe[] | null;
  reward_s: Maybe[] | null;
  totals: Record<string, number>;
}

export interface Ledger extends WithProblems {
  time: Maybe;
  source: string;
  dispatched: number;
  trained: number;
  dropped: number;
  buffered: number;
  in_flight: number;
  missing: number;
  drops: { kind: string; count: number; text: string; message: string }[];
  balanced: boolean;
}

export interface Doctor extends WithProblems {
  findings: { kind: string; severity: "problem" | "hint"; what: string; remedy: string }[];
  is_healthy: boolean;
  life?: { state: string; text: string };
}

export interface Timeline extends WithProblems {
  source: "trace" | "metrics" | "none";
  began: number;
  total: [number, number];
  window: [number, number];
  rows: { name: string; text: string; bars: [number, number, number, string][]; /** False if only the length of bars is known, not when in the step they were. */ is_place_known?: boolean }[];
  marks: { at: number; step: number }[];
  num_left_out: number;
}

export interface ServerRow {
  name: string;
  url: string;
  version: Maybe;
  num_running: Maybe;
  num_waiting: Maybe;
  is_alive: boolean;
  num_restarts: Maybe;
  state: string;
}

export interface EngineNow {
  num_running: Maybe;
  num_waiting: Maybe;
  kv_used: Maybe;
  cache_hits: Maybe;
  tokens_per_s: Maybe;
  is_paused?: boolean;
  is_asleep?: boolean;
  num_restarts?: Maybe;
  metrics: Record<string, Maybe>;
}

/** Which curves are drawn together; the server knows what it sends. */
export interface EngineChart {
  title: string;
  unit: string;
  format: "number" | "percent" | "short";
  keys: string[];
}

export interface Engine extends WithProblems {
  source: string;
  time: Maybe;
  is_live: boolean;
  version: Maybe;
  engine: EngineNow | null;
  servers: ServerRow[];
  history: { steps: number[]; series: Record<string, Series> };
  charts: EngineChart[];
  capacity: Maybe;
}

export interface Servers extends WithProblems {
  servers: (EngineNow & { url: string; is_alive: boolean; error: string; version: Maybe; model: string; members: ServerRow[] })[];
}

export interface Index {
  state: "none" | "building" | "ready";
  done: number;
  total: number;
}

export interface Steps extends WithProblems {
  source: string;
  steps: { step: number; num: Maybe; files: number }[];
  total: Maybe;
  index: Index;
}

export interface Row {
  id: string;
  step: number;
  uid: string;
  sample: number;
  data_source: string;
  reward: Maybe;
  length: number;
  prompt_length: number;
  stop_reason: string;
  ended_by: string | null;
  turns: number;
  tool_calls: number;
  failures: number;
  gap: Maybe;
  advantage: Maybe;
  prompt: string;
  response: string;
}

export interface Rollouts extends WithProblems {
  total: number;
  offset: number;
  limit: number;
  is_complete: boolean;
  searched: number;
  index: Index;
  stop_reasons: string[];
  data_sources: string[];
  ended_by: string[];
  rollouts: Row[];
  next_cursor?: string | null;
}

export interface GroupRow {
  uid: string;
  step: number;
  num: number;
  reward_mean: Maybe;
  reward_min: Maybe;
  reward_max: Maybe;
  rewards: Maybe[];
  length_mean: number;
  turns_max: number;
  failures: number;
  prompt: string;
  data_source: string;
}

export interface Groups extends WithProblems {
  total: number;
  offset: number;
  limit: number;
  groups: GroupRow[];
}

/** An image, or a video as frames, and the tokens that stand for it: where each block begins, and its length. */
export interface MediaItem {
  kind: "image" | "video";
  digest: string;
  num_frames: number;
  frames_per_s: Maybe;
  blocks: [number, number][];
}

export interface Message {
  role: string;
  content: string;
  /** The content of a message with images or videos. */
  parts?: ({ type: "text"; text: string } | { type: "image" | "video"; digest: string | null })[];
  tool_calls?: { name: string; arguments: string }[];
  name?: string | null;
}

export interface Group extends WithProblems {
  uid: string;
  step: number;
  source: string;
  prompt: string;
  data_source: string;
  ground_truth: string;
  /** Of the prompt. */
  media: MediaItem[];
  rollouts: (Row & { is_cut: boolean; messages: Message[]; media: MediaItem[] })[];
}

export interface PromptOverSteps extends WithProblems {
  uid: string;
  index: Index;
  prompt: string;
  num_steps: number;
  steps: { step: number; rewards: Maybe[]; reward_mean: Maybe; length_mean: number; best: Row; worst: Row }[];
}

export interface Rollout extends WithProblems {
  id: string;
  source: string;
  step: number;
  uid: string;
  sample: number;
  data_source: string;
  prompt: string;
  response: string;
  ground_truth: string;
  reward: Maybe;
  stop_reason: string;
  ended_by: string | null;
  turns: number;
  prompt_length: number;
  num_tokens: number;
  length: number;
  tool_calls: number;
  failures: number;
  gap: Maybe;
  messages: Message[];
  media: MediaItem[];
  info: Record<string, unknown>;
  reward_info: Record<string, unknown>;
  turn_rewards: Maybe[];
  columns: string[];
  exact_bytes: boolean;
  policy_versions: number[];
  segments: [number, number, string][];
  previous: string | null;
  next: string | null;
  siblings: { id: string; sample: number; reward: Maybe }[];
  ranges: Record<string, [Maybe, Maybe]>;
  is_cut?: boolean;
  /** In an exported file: how many tokens, from the first, it has. */
  num_tokens_in_file?: number;
}

export type Values = Maybe[] | null | undefined;

export interface Tokens extends WithProblems {
  id: string;
  offset: number;
  limit: number;
  total: number;
  ids: number[];
  texts: string[];
  bytes: string[];
  is_split: number[];
  mask: number[];
  versions: number[];
  turns: number[];
  kinds: number[];
  retokenised: number[];
  logprobs: Values;
  learner_logprobs: Values;
  difference: Values;
  advantages: Values;
  returns: Values;
  values: Values;
  reference_logprobs: Values;
  entropies: Values;
}

export interface Mismatches extends WithProblems {
  id: string;
  tokens: { place: number; difference: number; logprob: number; learner_logprob: number; text: string }[];
}
