// Module `_aici`: the names that the original's native module had.
export { Constraint, cfgConstraint, regexConstraint, substrConstraint } from "aici/constraints"
export {
  appendVar,
  detokenize,
  eosToken,
  getConfig,
  getVar,
  selfSeqId,
  setVar,
  tokenize,
  tokenRepr,
  tokensRepr,
  TokenSet,
} from "aici/tokens"
export { panic } from "aici/globals"
export { inspect as bufferRepr, toBytes as stringToBuffer, toText as bufferToString } from "aici/text"
