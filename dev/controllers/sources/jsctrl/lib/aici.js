// Module `aici`: everything that a script can import.
import { cfgConstraint, larkConstraint, jsonConstraint, regexConstraint, substrConstraint } from "aici/constraints"
import { panic } from "aici/globals"
import { FixedTokens, StopToken } from "aici/steps"

export { ChooseConstraint, Constraint, HostConstraint } from "aici/constraints"
export { cfgConstraint, jsonConstraint, larkConstraint, regexConstraint, substrConstraint }
export { AiciAsync, getPrompt, getPromptLen, getTokens, start, test } from "aici/driver"
export { chat, template } from "aici/chat"
export { candidates, gen, generate, genTokens } from "aici/gen"
export { logLevel, setLogLevel } from "aici/level"
export { Branch, MidProcessResult, PostProcessResult, PreProcessResult, Splice } from "aici/results"
export {
  ConstrainedToken,
  fixed,
  FixedTokens,
  fork,
  Label,
  NextToken,
  Noop,
  PreToken,
  sleep,
  stop,
  StopToken,
  TimeoutError,
  waitVars,
} from "aici/steps"
export { assert, AssertionError, inspect, log } from "aici/text"
export {
  allTokens,
  appendVar,
  backtrackSupported,
  checkVar,
  checkVars,
  detokenize,
  eosToken,
  forkSupported,
  getConfig,
  getVar,
  selfSeqId,
  setVar,
  tokenize,
  tokenRepr,
  tokensRepr,
  TokenSet,
} from "aici/tokens"
export { tool, ToolCall, ToolError } from "aici/tools"
export { getProbes, setControlVectors } from "aici/vectors"
export { $, panic } from "aici/globals"

export const helpers = {
  cfgConstraint,
  larkConstraint,
  jsonConstraint,
  regexConstraint,
  substrConstraint,
  regex_constraint: regexConstraint,
  cfg_constraint: cfgConstraint,
  substr_constraint: substrConstraint,
  FixedTokens,
  StopToken,
  panic,
}
