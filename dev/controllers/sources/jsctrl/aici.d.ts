// Types of module `aici`, for editors. Put it beside a script, with this line on the script's top:
//
//     /// <reference path="aici.d.ts" />

declare module "aici" {
  export type Token = number
  export type Bytes = Uint8Array
  export type Text = string | Bytes

  // -- text ---------------------------------------------------------------------------------------------------

  export interface SamplingOptions {
    temperature?: number
    topP?: number
    topK?: number
    minP?: number
    typicalP?: number
    repetitionPenalty?: number
    presencePenalty?: number
    frequencyPenalty?: number
    bias?: Iterable<[Token, number]> | Record<Token, number>
    topLogprobs?: number
    /** What the text, or its tokens, will probably be: this changes nothing but the time. */
    draft?: Text | Token[]
  }
  /** At most one of them. */
  export interface ConstraintOptions {
    regex?: RegExp | string
    options?: string[]
    choice?: string[]
    jsonSchema?: object | string
    jsonObject?: true
    lark?: string
    yacc?: string
    substring?: string
    substringEnd?: string
    constraint?: Constraint | object
  }
  export interface GenOptions extends SamplingOptions, ConstraintOptions {
    /** 20 if it is left out. */
    maxTokens?: number
    stopAt?: Text | Text[]
    storeVar?: string
    /** A text that matches `regex` ends where the model would leave the pattern; the longest one goes on. */
    longest?: boolean
  }
  export interface Message {
    role: string
    content: string | object[] | null
    [field: string]: unknown
  }
  export interface ChatOptions {
    tools?: object[]
    addGenerationPrompt?: boolean
    variables?: Record<string, unknown>
  }
  /** The conversation as the model's chat template writes it. */
  export function template(messages: string | Message[], options?: ChatOptions): string
  /** Append it; with `following` it takes the place of all behind that label. */
  export function chat(messages: string | Message[], options?: ChatOptions & { following?: Label }): Promise<Token[]>
  export interface Candidate {
    token: Token
    text: string
    logprob: number
  }
  export interface Generated {
    text: string
    bytes: Bytes
    tokens: Token[]
    candidates: Candidate[][]
    reason: "constraint" | "eos" | "stopAt" | "maxTokens"
  }
  export function $(strings: TemplateStringsArray, ...values: unknown[]): Promise<Token[]>
  export function fixed(text: Text): Promise<Token[]>
  export function gen(options?: GenOptions): Promise<string>
  export function genTokens(options?: GenOptions): Promise<Token[]>
  export function generate(options?: GenOptions): Promise<Generated>
  export function candidates(count: number, options?: GenOptions): Promise<Candidate[]>

  // -- the script ---------------------------------------------------------------------------------------------

  export function start(main: () => unknown): AiciAsync
  export function test(main: () => unknown): AiciAsync
  /** What `start` makes. */
  export class AiciAsync {
    constructor(main: () => unknown)
    static instance: AiciAsync | null
    /** Complete the awaited step by hand; done when the script awaits the next one. */
    step(tokens: Token[]): Promise<void>
  }
  export function stop(): Promise<never>
  export function panic(message?: unknown): never
  export function getTokens(): Token[]
  export function getPrompt(): Promise<Token[]>
  export function getPromptLen(): number

  export class Label {
    constructor(ptr?: number)
    ptr: number
    tokensSince(): Token[]
    textSince(): string
    fixedAfter(text: Text): Promise<Token[]>
    rewind(): Promise<Token[]>
  }

  // -- forks and variables ------------------------------------------------------------------------------------

  export function fork(count: number | Branch[]): Promise<number>
  export function waitVars(...names: (string | { timeout?: number })[]): Promise<Bytes[]>
  export function sleep(ms: number): Promise<void>
  export function tool(name: string, args?: Record<string, unknown>, options?: { timeout?: number }): ToolCall
  export class ToolCall {
    readonly name: string
    readonly isDone: boolean
    text(): Promise<string>
    json(): Promise<unknown>
    cancel(): void
  }
  export class ToolError extends Error {}
  export class TimeoutError extends Error {}
  export function getVar(name: string): Bytes | null
  export function setVar(name: string, value: Text): number
  export function appendVar(name: string, value: Text): number
  export function checkVar(name: string, expected: string): void
  export function checkVars(expected: Record<string, string>): void
  export function selfSeqId(): number
  export function getConfig(name: string): number
  export function forkSupported(): boolean
  export function backtrackSupported(): boolean
  /** New scales of control vectors that the request names, from the next token on. */
  export function setControlVectors(scales: Record<string, number>): void
  /** Readings of the request's probes where the last token was sampled. */
  export function getProbes(): number[]

  // -- tokens and constraints ---------------------------------------------------------------------------------

  export function tokenize(text: Text): Token[]
  export function detokenize(tokens: Iterable<Token> & { length: number }): Bytes
  export function tokenRepr(token: Token): string
  export function tokensRepr(tokens: Iterable<Token>): string
  export function eosToken(): Token
  export function allTokens(): TokenSet

  export class TokenSet implements Iterable<Token> {
    readonly length: number
    has(token: Token): boolean
    add(token: Token): this
    delete(token: Token): this
    clear(): void
    setAll(value: boolean): void
    addAll(other: TokenSet): this
    numSet(): number
    [Symbol.iterator](): Iterator<Token>
  }

  export class Constraint {
    eosAllowed(): boolean
    eosForced(): boolean
    tokenAllowed(token: Token): boolean
    appendToken(token: Token): void
    allowTokens(set: TokenSet): void
    forcedTokens(): Token[]
  }
  export class HostConstraint extends Constraint {
    constructor(data: object)
  }
  export class ChooseConstraint extends Constraint {
    constructor(options: string[])
  }
  export function regexConstraint(regex: RegExp | string): Constraint
  export function cfgConstraint(yacc: string): Constraint
  export function substrConstraint(text: string, end?: string): Constraint
  export function larkConstraint(grammar: string): Constraint
  export function jsonConstraint(schema: object | string): Constraint
  export const helpers: {
    regexConstraint: typeof regexConstraint
    cfgConstraint: typeof cfgConstraint
    substrConstraint: typeof substrConstraint
    larkConstraint: typeof larkConstraint
    jsonConstraint: typeof jsonConstraint
  }

  // -- steps --------------------------------------------------------------------------------------------------

  export class NextToken {
    finished: boolean
    currTokens: Token[] | null
    preProcess(): PreProcessResult
    run(): Promise<Token[]>
    midProcess(): MidProcessResult
    postProcess(backtrack: number, tokens: Token[], told?: object): unknown
    isFixed(): boolean
  }
  export class PreToken extends NextToken {}
  export class FixedTokens extends NextToken {
    constructor(text: Text, following?: Label | null)
  }
  export class ConstrainedToken extends NextToken {
    constructor(make: () => Constraint, sampling?: BranchSampling)
    readonly constraint: Constraint
    accepted(forced: Token[]): Token[]
    proposed(): Token[]
  }
  export class StopToken extends NextToken {}
  export class Noop extends NextToken {}

  export interface BranchSampling {
    temperature?: number
    sampling?: Record<string, number>
    bias?: [Token, number][]
    top_logprobs?: number
  }
  export interface BranchFields {
    mask?: TokenSet | Constraint | "any" | null
    sampleMask?: TokenSet | null
    splices?: Splice[]
    sampling?: BranchSampling
    /** Tokens that will probably be drawn from here on: this changes nothing but the time. */
    draft?: Token[]
  }
  export class Splice {
    constructor(backtrack?: number, ffTokens?: Token[], whenSampled?: Token[])
    addSplice(other: Splice): void
  }
  export class Branch {
    constructor(fields?: BranchFields)
    static noop(): Branch
    isSplice(): boolean
  }
  export class MidProcessResult {
    constructor(branches?: Branch[])
    static bias(set: TokenSet | Constraint): MidProcessResult
    static sample(branch?: BranchFields): MidProcessResult
    static splice(backtrack: number, ffTokens: Token[]): MidProcessResult
    static ahead(ffTokens: Token[]): MidProcessResult
    static stop(): MidProcessResult
    static noop(): MidProcessResult
    static skip(): MidProcessResult
    static skipMe(): MidProcessResult
    readonly skip_me: boolean
    isSplice(): boolean
    static fork(count: number): MidProcessResult
    static wait(until: { variable?: string; newerThan?: number; ms?: number }): MidProcessResult
  }
  export class PreProcessResult {
    static continue_(): PreProcessResult
    static suspend(): PreProcessResult
    static fork(count: number): PreProcessResult
    static ffTokens(tokens: Token[]): PreProcessResult
  }
  export class PostProcessResult {
    static continue_(): PostProcessResult
    static stop(): PostProcessResult
    static fromTokens(tokens: Token[]): PostProcessResult
  }

  // -- printing -----------------------------------------------------------------------------------------------

  export function inspect(value: unknown): string
  export function log(...values: unknown[]): void
  export function logLevel(): number
  export function setLogLevel(level: number): void
  export function assert(condition: unknown, message?: string): asserts condition
  export class AssertionError extends Error {}
}

declare const $: typeof import("aici").$
declare const assert: typeof import("aici").assert
declare const fixed: typeof import("aici").fixed
declare const fork: typeof import("aici").fork
declare const gen: typeof import("aici").gen
declare const chat: typeof import("aici").chat
declare const template: typeof import("aici").template
declare const genTokens: typeof import("aici").genTokens
declare const start: typeof import("aici").start
declare const tool: typeof import("aici").tool
declare const waitVars: typeof import("aici").waitVars

interface String {
  toBuffer(): Uint8Array
}
interface StringConstructor {
  fromBuffer(bytes: Uint8Array): string
}
interface Uint8Array {
  decode(): string
}
