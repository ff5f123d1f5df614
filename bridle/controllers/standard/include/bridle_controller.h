/* The interface between a controller and its host: what a WebAssembly module may import and what it must export.
 *
 * A controller is a core module that steers one sequence of tokens. The host calls it once for each step; it answers
 * what may come next. This header declares both sides and nothing else; it needs no C library. `bridle_steps.h` has
 * helpers on top of it: reading steps, writing decisions, masks, the token trie, variables.
 *
 *   zig cc --target=wasm32-freestanding -ffreestanding -nostdlib -mcpu=generic+bulk_memory -Wl,--no-entry \
 *     -Wl,-z,stack-size=65536 -Oz -I. -o mine.wasm mine.c
 *
 * How it goes:
 *
 *   aici_init()                  once, before anything else
 *   handle = aici_create()       build the controller; the user's argument is blob aici_host_module_arg()
 *   aici_init_prompt(handle)     see, and maybe rewrite, the prompt
 *   aici_mid_process(handle)     once for each step, until it answers with no branches
 *
 * The last two read blob aici_host_process_arg() and must answer through aici_host_return_process_result(), in JSON:
 *
 *   init_prompt   {"prompt": [1, 2]}                                       -> {"prompt": [1, 2]}
 *   mid_process   {"backtrack": 0, "tokens": [3], "sampled": 3, "fork_group": [7], "candidates": [[3, -0.1]]}
 *                 -> {"branches": [BRANCH, ...]}  one goes on, several fork, none stops; or
 *                 -> {"wait": {"variable": "x", "newer_than": 3, "ms": 50}}  ask again when one of them happens
 *   BRANCH        {"sample_mask": name or null, "temperature": number or null, "splices": [SPLICE, ...]}
 *                 and, additions of bridle: "sampling": {"top_p": 0.9}, parameters of this one draw;
 *                 "bias": [[token, value], ...]; "top_logprobs": how many candidates to show in the next step;
 *                 "draft": [token, ...], what will probably be drawn from here on: computed ahead, and nothing else
 *   SPLICE        {"when_sampled": [token, ...], "backtrack": 0, "ff_tokens": [token, ...]}
 *
 * `tokens` were appended, after `backtrack` older ones had been taken back; `candidates` stands there only if the last
 * answer asked for it. A branch without a mask draws nothing and has exactly one splice: take back, then append (both
 * empty: wait a step). A branch with a mask draws a token s; the first splice whose `when_sampled` has s, or is empty,
 * is applied then, and `backtrack` counts s. Without one, s is appended.
 *
 * A fork copies the whole instance, memory and all. The copy's `fork_group` lists the ids of all branches; its place in
 * it is the number of the branch. What a controller does wrong (a pointer outside its memory, a trap, too much time)
 * ends its own request and is told to the user.
 */
#ifndef BRIDLE_CONTROLLER_H
#define BRIDLE_CONTROLLER_H

#include <stddef.h>
#include <stdint.h>

#define BRIDLE_IMPORT(module, name) __attribute__((import_module(module), import_name(name))) extern
#define BRIDLE_EXPORT(name) __attribute__((export_name(name), visibility("default")))

/* A byte string on the host's side. The number means nothing by itself. */
typedef uint32_t bridle_blob;
/* Names a set of tokens that the host holds for the time of one callback. */
typedef uint32_t bridle_mask;
typedef uint32_t bridle_token;
/* A constraint on the host's side. */
typedef uint32_t bridle_constraint;

/* -- what a controller exports ------------------------------------------------------------------------------------ */

BRIDLE_EXPORT("aici_init") void aici_init(void);
/* Gives a number that the other callbacks get back. */
BRIDLE_EXPORT("aici_create") uint32_t aici_create(void);
BRIDLE_EXPORT("aici_init_prompt") void aici_init_prompt(uint32_t handle);
BRIDLE_EXPORT("aici_mid_process") void aici_mid_process(uint32_t handle);
/* A module may also export `aici_panic` (no arguments): it is called once after a fatal error, to print last words. */

/* -- AICI's imports ----------------------------------------------------------------------------------------------- */

/* Write the first `size` bytes of a blob (fewer, if it is shorter) to `target`; gives the blob's whole length. */
BRIDLE_IMPORT("env", "aici_host_read_blob") uint32_t aici_host_read_blob(bridle_blob blob, void *target, uint32_t size);
/* The user's argument: text. */
BRIDLE_IMPORT("env", "aici_host_module_arg") bridle_blob aici_host_module_arg(void);
/* What the running callback is told: JSON. */
BRIDLE_IMPORT("env", "aici_host_process_arg") bridle_blob aici_host_process_arg(void);
/* All tokens as a trie of their bytes; `bridle_steps.h` reads it. */
BRIDLE_IMPORT("env", "aici_host_token_trie") bridle_blob aici_host_token_trie(void);
/* u32 ids of the tokens that spell a text; good until the next call. Nothing is put before or behind. */
BRIDLE_IMPORT("env", "aici_host_tokenize") bridle_blob aici_host_tokenize(const void *text, uint32_t length);
/* Hand over a set of tokens: bit i % 32 of word i / 32 is token i. Gives its name for `sample_mask`. */
BRIDLE_IMPORT("env", "aici_host_return_logit_bias") bridle_mask aici_host_return_logit_bias(const uint32_t *bits);
/* The number of this sequence, as `fork_group` has it. */
BRIDLE_IMPORT("env", "aici_host_self_seq_id") uint32_t aici_host_self_seq_id(void);
/* Answer the running callback: JSON. The last call counts. */
BRIDLE_IMPORT("env", "aici_host_return_process_result")
void aici_host_return_process_result(const void *json, uint32_t length);
/* A command on the variables that all sequences of a request share; gives its answer. Both are JSON:
 *   {"ReadVar": {"name": "x"}}                         -> {"ReadVar": {"version": 1, "value": "00ff"}}
 *                                                      or {"VariableMissing": {}}
 *   {"WriteVar": {"name": "x", "value": "00ff", "op": "Set" or "Append", "when_version_is": number or null}}
 *                                                      -> {"WriteVar": {"version": 2}}, or as for a read if the
 *                                                         version was another one
 * Values are hexadecimal. What is written is sent to the user, too. */
BRIDLE_IMPORT("env", "aici_host_storage_cmd")
bridle_blob aici_host_storage_cmd(const void *json, uint32_t length);
BRIDLE_IMPORT("env", "aici_host_eos_token") bridle_token aici_host_eos_token(void);
/* 1 if the engine can do it: `fork`, `backtrack`, `ff_tokens`. */
BRIDLE_IMPORT("env", "aici_host_get_config") uint32_t aici_host_get_config(const char *name, uint32_t length);
/* End the request with an error. */
BRIDLE_IMPORT("env", "aici_host_stop") __attribute__((noreturn)) void aici_host_stop(void);

/* -- additions of bridle: constraints that live on the host's side --------------------------------------------------
 *
 * Kinds: `regex`, `json_schema`, `json_object` (specification empty), `lark`, `yacc`, `substring`, `choice` (a JSON
 * list of texts), `constraint` (any constraint of bridle's HTTP interface, as JSON). A fork copies handles. */

enum {
  BRIDLE_MAY_END = 1,   /* the text may end here */
  BRIDLE_MUST_END = 2,  /* nothing may follow */
  BRIDLE_FAILED = 4,    /* the specification makes no sense, or a token was committed that is not allowed */
};

/* A handle, never 0. A specification that makes no sense gives one that has failed. */
BRIDLE_IMPORT("bridle", "constraint_new")
bridle_constraint bridle_constraint_new(const char *kind, uint32_t kind_length, const char *spec, uint32_t length);
/* The set of tokens that may come next, for `sample_mask`. */
BRIDLE_IMPORT("bridle", "constraint_allow") bridle_mask bridle_constraint_allow(bridle_constraint handle);
/* The same set as a blob of bits. */
BRIDLE_IMPORT("bridle", "constraint_mask") bridle_blob bridle_constraint_mask(bridle_constraint handle);
/* Tell it what was appended; gives how many tokens were taken. */
BRIDLE_IMPORT("bridle", "constraint_commit")
uint32_t bridle_constraint_commit(bridle_constraint handle, const bridle_token *tokens, uint32_t count);
/* Take the last tokens back; 1 if that was possible. */
BRIDLE_IMPORT("bridle", "constraint_rollback")
uint32_t bridle_constraint_rollback(bridle_constraint handle, uint32_t count);
/* A blob with the u32 ids of the tokens that must come next: append them without drawing. */
BRIDLE_IMPORT("bridle", "constraint_ff") bridle_blob bridle_constraint_ff(bridle_constraint handle);
/* The three bits above. */
BRIDLE_IMPORT("bridle", "constraint_status") uint32_t bridle_constraint_status(bridle_constraint handle);
/* A blob with the text of what went wrong. */
BRIDLE_IMPORT("bridle", "constraint_error") bridle_blob bridle_constraint_error(bridle_constraint handle);
/* Forget it; 1 if there was one. */
BRIDLE_IMPORT("bridle", "constraint_free") uint32_t bridle_constraint_free(bridle_constraint handle);

/* -- further additions of bridle ---------------------------------------------------------------------------------- */

BRIDLE_IMPORT("bridle", "vocab_size") uint32_t bridle_vocab_size(void);
/* A blob with the bytes of tokens, one after the other; special ones have none. */
BRIDLE_IMPORT("bridle", "detokenize") bridle_blob bridle_detokenize(const bridle_token *tokens, uint32_t count);
/* A conversation by the model's chat template, as JSON: {"messages": [...], "tools": [...], "add_generation_prompt": true,
 * "variables": {...}}. The blob has {"text": "...", "tokens": [...]}, or {"error": "..."}. */
BRIDLE_IMPORT("bridle", "render_chat") bridle_blob bridle_render_chat(const char *conversation, uint32_t length);
/* 1 if the running callback is about to be ended: it is late, or nobody wants it any more. Who asks now and then has a
 * moment to say, by `bridle_fail`, where it was. */
BRIDLE_IMPORT("bridle", "is_time_up") uint32_t bridle_is_time_up(void);
/* End the request with an error of this text. */
BRIDLE_IMPORT("bridle", "fail") __attribute__((noreturn)) void bridle_fail(const char *text, uint32_t length);

/* -- the part of WASI 1 that does something ---------------------------------------------------------------------------
 *
 * Descriptors 1 and 2 are the log that the user sees. Files, clocks and the network are not there. A program that links
 * with wasi-libc can use printf instead. */

struct bridle_span {
  const void *data;
  uint32_t length;
};

BRIDLE_IMPORT("wasi_snapshot_preview1", "fd_write")
uint32_t bridle_fd_write(uint32_t descriptor, const struct bridle_span *spans, uint32_t count, uint32_t *written);

#endif
