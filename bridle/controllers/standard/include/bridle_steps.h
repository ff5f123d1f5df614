/* Helpers for controllers in C, on top of `bridle_controller.h`: a step in, a decision out.
 *
 *   void aici_mid_process(uint32_t handle) {
 *     struct bridle_step step = bridle_read_step();
 *     if (step.num_tokens) return bridle_stop();
 *     bridle_clear(&set);
 *     bridle_allow(&set, token);
 *     bridle_sample(bridle_mask_of(&set));
 *   }
 *
 * Everything is static and small, needs no C library and goes along with one. Memory that is handed out stays until the
 * sequence ends; buffers are used again.
 */
#ifndef BRIDLE_STEPS_H
#define BRIDLE_STEPS_H

#include "bridle_controller.h"

/* A function that is used in many places, and small only if it is not copied to each. */
#define BRIDLE_SHARED static __attribute__((noinline, unused))

/* -- memory and text ---------------------------------------------------------------------------------------------- */

/* Fresh memory, zeroed. Traps when there is no more. */
BRIDLE_SHARED void *bridle_alloc(uint32_t size) {
  static uintptr_t next, end;
  size = (size + 15) & ~15u;
  if (end - next < size) {
    uint32_t pages = (size + 0xffff) >> 16;
    uintptr_t start = __builtin_wasm_memory_grow(0, pages) << 16;
    if (start == (uintptr_t)-1 << 16) __builtin_trap();
    if (start != end) next = start;
    end = start + ((uintptr_t)pages << 16);
  }
  void *found = (void *)next;
  next += size;
  return found;
}

static inline void bridle_copy(void *target, const void *source, uint32_t length) {
  __builtin_memcpy(target, source, length);
}

static inline uint32_t bridle_length(const char *text) {
  uint32_t length = 0;
  while (text[length]) length++;
  return length;
}

/* Bytes that grow. */
struct bridle_text {
  char *data;
  uint32_t length, room;
};

static inline void bridle_reserve(struct bridle_text *text, uint32_t more) {
  if (text->length + more <= text->room) return;
  uint32_t room = text->room ? text->room : 256;
  while (room < text->length + more) room *= 2;
  char *data = bridle_alloc(room);
  if (text->length) bridle_copy(data, text->data, text->length);
  text->data = data;
  text->room = room;
}

BRIDLE_SHARED void bridle_add_bytes(struct bridle_text *text, const void *data, uint32_t length) {
  bridle_reserve(text, length);
  bridle_copy(text->data + text->length, data, length);
  text->length += length;
}

BRIDLE_SHARED void bridle_add(struct bridle_text *text, const char *words) {
  bridle_add_bytes(text, words, bridle_length(words));
}

BRIDLE_SHARED void bridle_add_number(struct bridle_text *text, uint32_t value) {
  char digits[10];
  uint32_t at = sizeof digits;
  do digits[--at] = (char)('0' + value % 10);
  while (value /= 10);
  bridle_add_bytes(text, digits + at, (uint32_t)sizeof digits - at);
}

/* A number with six places. */
static inline void bridle_add_real(struct bridle_text *text, double value) {
  if (value < 0) {
    bridle_add(text, "-");
    value = -value;
  }
  uint32_t whole = (uint32_t)value;
  bridle_add_number(text, whole);
  uint32_t rest = 1000000 + (uint32_t)((value - whole) * 1e6);
  uint32_t begin = text->length;
  bridle_add_number(text, rest);
  text->data[begin] = '.'; /* where the leading 1 stood */
}

BRIDLE_SHARED void bridle_add_tokens(struct bridle_text *text, const bridle_token *tokens, uint32_t count) {
  bridle_add(text, "[");
  for (uint32_t i = 0; i < count; i++) {
    if (i) bridle_add(text, ",");
    bridle_add_number(text, tokens[i]);
  }
  bridle_add(text, "]");
}

/* Read a whole blob, in place of what `text` had. A zero stands behind it. */
BRIDLE_SHARED void bridle_read(struct bridle_text *text, bridle_blob blob) {
  text->length = 0;
  bridle_reserve(text, 256);
  uint32_t length = aici_host_read_blob(blob, text->data, text->room - 1);
  if (length >= text->room) {
    bridle_reserve(text, length + 1);
    aici_host_read_blob(blob, text->data, length);
  }
  text->length = length;
  text->data[length] = 0;
}

/* Print a line to the user's log. */
static inline void bridle_log(const char *words) {
  struct bridle_span spans[2] = {{words, bridle_length(words)}, {"\n", 1}};
  uint32_t written;
  bridle_fd_write(1, spans, 2, &written);
}

/* End the request, saying why; works on any host. */
static inline __attribute__((noreturn)) void bridle_panic(const char *why) {
  bridle_log(why);
  aici_host_stop();
}

/* The user's argument, with a zero behind it. */
static inline struct bridle_text bridle_argument(void) {
  struct bridle_text text = {0};
  bridle_read(&text, aici_host_module_arg());
  return text;
}

/* -- tokens ------------------------------------------------------------------------------------------------------- */

struct bridle_tokens {
  bridle_token *data;
  uint32_t count;
};

/* The tokens of a blob of u32 ids, in memory that the next call uses again. */
static inline struct bridle_tokens bridle_tokens_of(bridle_blob blob) {
  static struct bridle_text text;
  bridle_read(&text, blob);
  struct bridle_tokens tokens = {(bridle_token *)(void *)text.data, text.length / 4};
  return tokens;
}

static inline struct bridle_tokens bridle_tokenize(const char *words) {
  return bridle_tokens_of(aici_host_tokenize(words, bridle_length(words)));
}

/* -- steps -------------------------------------------------------------------------------------------------------- */

#define BRIDLE_NONE 0xffffffffu

/* What a callback is told. Good until the next one. */
struct bridle_step {
  uint32_t backtrack;
  bridle_token *tokens; /* of aici_init_prompt: the prompt */
  uint32_t num_tokens;
  bridle_token sampled; /* or BRIDLE_NONE */
  uint32_t *fork_group;
  uint32_t fork_group_size;
};

/* Behind `"key":`, or null. All texts of a step are keys, so looking for one is enough. */
BRIDLE_SHARED const char *bridle_find(const char *json, const char *key) {
  for (; *json; json++) {
    if (*json != '"') continue;
    uint32_t i = 0;
    while (key[i] && json[1 + i] == key[i]) i++;
    if (key[i] || json[1 + i] != '"') continue;
    json += i + 2;
    while (*json == ' ' || *json == ':') json++;
    return json;
  }
  return 0;
}

static inline const char *bridle_parse_number(const char *json, uint32_t *value) {
  *value = 0;
  while (*json >= '0' && *json <= '9') *value = *value * 10 + (uint32_t)(*json++ - '0');
  return json;
}

BRIDLE_SHARED uint32_t bridle_parse_list(const char *json, struct bridle_text *into) {
  into->length = 0;
  while (json && *json && *json != ']') {
    uint32_t value;
    if (*json >= '0' && *json <= '9') {
      json = bridle_parse_number(json, &value);
      bridle_add_bytes(into, &value, sizeof value);
    } else {
      json++;
    }
  }
  return into->length / 4;
}

/* What the running callback is told. */
BRIDLE_SHARED struct bridle_step bridle_read_step(void) {
  static struct bridle_text json, tokens, group;
  bridle_read(&json, aici_host_process_arg());
  struct bridle_step step = {0};
  const char *found = bridle_find(json.data, "prompt");
  step.num_tokens = bridle_parse_list(found ? found : bridle_find(json.data, "tokens"), &tokens);
  step.tokens = (bridle_token *)(void *)tokens.data;
  step.fork_group_size = bridle_parse_list(bridle_find(json.data, "fork_group"), &group);
  step.fork_group = (uint32_t *)(void *)group.data;
  if ((found = bridle_find(json.data, "backtrack"))) bridle_parse_number(found, &step.backtrack);
  step.sampled = BRIDLE_NONE;
  found = bridle_find(json.data, "sampled");
  if (found && *found >= '0' && *found <= '9') bridle_parse_number(found, &step.sampled);
  return step;
}

/* The number of the branch that this sequence is, in the step after a fork; 0 is the original. */
static inline uint32_t bridle_branch_number(const struct bridle_step *step) {
  uint32_t own = aici_host_self_seq_id(), i = 0;
  while (i < step->fork_group_size && step->fork_group[i] != own) i++;
  return i < step->fork_group_size ? i : 0;
}

static inline int bridle_has_token(const struct bridle_step *step, bridle_token token) {
  for (uint32_t i = 0; i < step->num_tokens; i++)
    if (step->tokens[i] == token) return 1;
  return 0;
}

/* -- decisions ---------------------------------------------------------------------------------------------------- */

static inline void bridle_return(const struct bridle_text *json) {
  aici_host_return_process_result(json->data, json->length);
}

static inline void bridle_return_words(const char *json) {
  aici_host_return_process_result(json, bridle_length(json));
}

/* Answer aici_init_prompt: the prompt as it shall be. */
static inline void bridle_return_prompt(const bridle_token *tokens, uint32_t count) {
  static struct bridle_text json;
  json.length = 0;
  bridle_add(&json, "{\"prompt\":");
  bridle_add_tokens(&json, tokens, count);
  bridle_add(&json, "}");
  bridle_return(&json);
}

/* The same: as it is. */
static inline void bridle_keep_prompt(void) {
  struct bridle_step step = bridle_read_step();
  bridle_return_prompt(step.tokens, step.num_tokens);
}

/* End the sequence. */
static inline void bridle_stop(void) { bridle_return_words("{\"branches\":[]}"); }

/* Draw nothing, append nothing, be asked again. */
static inline void bridle_noop(void) {
  bridle_return_words("{\"branches\":[{\"sample_mask\":null,\"splices\":"
                      "[{\"when_sampled\":[],\"backtrack\":0,\"ff_tokens\":[]}]}]}");
}

/* Be asked again after so many milliseconds. */
static inline void bridle_wait(uint32_t milliseconds) {
  static struct bridle_text json;
  json.length = 0;
  bridle_add(&json, "{\"wait\":{\"ms\":");
  bridle_add_number(&json, milliseconds);
  bridle_add(&json, "}}");
  bridle_return(&json);
}

/* A decision with any number of branches: begin; for each branch open, add, close; end.
 *
 *   bridle_begin();
 *   bridle_open(mask);            or bridle_open(BRIDLE_NONE): draw nothing
 *   bridle_number("temperature", 0.7);
 *   bridle_sampling("top_p", 0.9);
 *   bridle_draft(likely, num_likely);
 *   bridle_splice(backtrack, tokens, count);
 *   bridle_close();
 *   bridle_end();
 */
static struct {
  struct bridle_text json, splices, sampling;
  uint32_t branches;
} bridle_decision;

static inline void bridle_begin(void) {
  bridle_decision.json.length = bridle_decision.branches = 0;
  bridle_add(&bridle_decision.json, "{\"branches\":[");
}

static inline void bridle_open(bridle_mask mask) {
  struct bridle_text *json = &bridle_decision.json;
  if (bridle_decision.branches++) bridle_add(json, ",");
  bridle_add(json, "{\"sample_mask\":");
  if (mask == BRIDLE_NONE) bridle_add(json, "null");
  else bridle_add_number(json, mask);
  bridle_decision.splices.length = bridle_decision.sampling.length = 0;
}

/* A number of the branch: `temperature`, `top_logprobs`. */
static inline void bridle_number(const char *name, double value) {
  struct bridle_text *json = &bridle_decision.json;
  bridle_add(json, ",\"");
  bridle_add(json, name);
  bridle_add(json, "\":");
  if (value == (double)(uint32_t)value) bridle_add_number(json, (uint32_t)value);
  else bridle_add_real(json, value);
}

/* What will probably be drawn from here on, this draw first. It changes nothing but the time. */
static inline void bridle_draft(const bridle_token *tokens, uint32_t count) {
  bridle_add(&bridle_decision.json, ",\"draft\":");
  bridle_add_tokens(&bridle_decision.json, tokens, count);
}

/* A parameter of this one draw: `top_p`, `top_k`, `min_p`, ... */
static inline void bridle_sampling(const char *name, double value) {
  struct bridle_text *json = &bridle_decision.sampling;
  bridle_add(json, json->length ? ",\"" : "\"");
  bridle_add(json, name);
  bridle_add(json, "\":");
  bridle_add_real(json, value);
}

/* Take back, then append; after a draw only if one of `when` was drawn (none: always), and `backtrack` counts it. */
BRIDLE_SHARED void bridle_splice_when(const bridle_token *when, uint32_t num_when, uint32_t backtrack,
                                      const bridle_token *tokens, uint32_t count) {
  struct bridle_text *json = &bridle_decision.splices;
  bridle_add(json, json->length ? ",{\"when_sampled\":" : "{\"when_sampled\":");
  bridle_add_tokens(json, when, num_when);
  bridle_add(json, ",\"backtrack\":");
  bridle_add_number(json, backtrack);
  bridle_add(json, ",\"ff_tokens\":");
  bridle_add_tokens(json, tokens, count);
  bridle_add(json, "}");
}

static inline void bridle_splice(uint32_t backtrack, const bridle_token *tokens, uint32_t count) {
  bridle_splice_when(0, 0, backtrack, tokens, count);
}

static inline void bridle_close(void) {
  struct bridle_text *json = &bridle_decision.json;
  if (bridle_decision.sampling.length) {
    bridle_add(json, ",\"sampling\":{");
    bridle_add_bytes(json, bridle_decision.sampling.data, bridle_decision.sampling.length);
    bridle_add(json, "}");
  }
  bridle_add(json, ",\"splices\":[");
  bridle_add_bytes(json, bridle_decision.splices.data, bridle_decision.splices.length);
  bridle_add(json, "]}");
}

static inline void bridle_end(void) {
  bridle_add(&bridle_decision.json, "]}");
  bridle_return(&bridle_decision.json);
}

/* Draw a token of the mask. */
static inline void bridle_sample(bridle_mask mask) {
  bridle_begin();
  bridle_open(mask);
  bridle_close();
  bridle_end();
}

/* Append tokens without drawing, after taking some back. */
static inline void bridle_append(uint32_t backtrack, const bridle_token *tokens, uint32_t count) {
  bridle_begin();
  bridle_open(BRIDLE_NONE);
  bridle_splice(backtrack, tokens, count);
  bridle_close();
  bridle_end();
}

/* -- the vocabulary and sets of tokens ---------------------------------------------------------------------------- */

/* The trie of all tokens' bytes: nodes in depth-first order. `words[0] >> 8` is the token that ends here (0xffffff:
 * none), the rest its last byte; `words[1] >> 8` the size of the subtree, the rest how many levels end with it. */
struct bridle_node {
  uint32_t words[2];
};

struct bridle_vocabulary {
  uint32_t size;
  bridle_token eos;
  uint32_t num_nodes;
  const struct bridle_node *nodes;
  const uint32_t *offsets; /* 10 bits of length, 22 bits of place in `bytes` */
  const uint8_t *bytes;
};

/* Read once, in aici_init or aici_create. */
static inline struct bridle_vocabulary bridle_read_vocabulary(void) {
  uint32_t length = aici_host_read_blob(aici_host_token_trie(), 0, 0);
  uint32_t *data = bridle_alloc(length);
  aici_host_read_blob(aici_host_token_trie(), data, length);
  if (length < 28 || data[0] != 0x558b6fd3) bridle_panic("the token trie has another format");
  const uint8_t *nodes = (const uint8_t *)data + data[1];
  struct bridle_vocabulary found = {
      .size = data[5],
      .eos = data[6],
      .num_nodes = data[2] / sizeof(struct bridle_node),
      .nodes = (const struct bridle_node *)(const void *)nodes,
      .offsets = (const uint32_t *)(const void *)(nodes + data[2]),
      .bytes = nodes + data[2] + data[3],
  };
  return found;
}

static inline const uint8_t *bridle_token_bytes(const struct bridle_vocabulary *all, bridle_token token,
                                                uint32_t *size) {
  *size = token < all->size ? all->offsets[token] & 0x3ff : 0;
  return token < all->size ? all->bytes + (all->offsets[token] >> 10) : all->bytes;
}

/* A set of tokens. */
struct bridle_set {
  uint32_t *bits;
  uint32_t num_words;
};

/* An empty set. If only the size of the vocabulary is needed, this reads no more of it. */
static inline struct bridle_set bridle_new_set(void) {
  uint32_t header[7];
  aici_host_read_blob(aici_host_token_trie(), header, sizeof header);
  struct bridle_set set = {0, (header[5] + 31) / 32};
  set.bits = bridle_alloc(4 * set.num_words + 4);
  return set;
}

static inline void bridle_clear(struct bridle_set *set) { __builtin_memset(set->bits, 0, 4 * set->num_words); }

static inline void bridle_allow(struct bridle_set *set, bridle_token token) {
  if (token >> 5 < set->num_words) set->bits[token >> 5] |= 1u << (token & 31);
}

static inline bridle_mask bridle_mask_of(const struct bridle_set *set) {
  return aici_host_return_logit_bias(set->bits);
}

/* May `byte` come next, `depth` bytes after the end of the text? The bytes at smaller depths were allowed just before,
 * so an automaton keeps its state for each depth in `context`. */
typedef int (*bridle_allows)(void *context, uint32_t depth, uint8_t byte);

/* Allow every token whose bytes are all allowed. */
static inline void bridle_walk(const struct bridle_vocabulary *all, struct bridle_set *set, bridle_allows allows,
                               void *context) {
  uint32_t depth = 0;
  for (uint32_t i = 1; i < all->num_nodes;) {
    const uint32_t *words = all->nodes[i].words;
    uint32_t subtree = words[1] >> 8, levels = words[1] & 0xff;
    if (allows(context, depth, (uint8_t)words[0])) {
      if (words[0] >> 8 != 0xffffff) bridle_allow(set, words[0] >> 8);
      depth = subtree == 1 ? depth + 1 - levels : depth + 1;
      i++;
    } else {
      depth = depth + 1 - levels;
      i += subtree;
    }
  }
}

/* -- variables, shared by all sequences of a request -------------------------------------------------------------- */

static inline void bridle_write_variable(const char *name, const void *value, uint32_t length, const char *op) {
  static struct bridle_text json;
  static const char digits[] = "0123456789abcdef";
  json.length = 0;
  bridle_add(&json, "{\"WriteVar\":{\"name\":\"");
  bridle_add(&json, name);
  bridle_add(&json, "\",\"value\":\"");
  bridle_reserve(&json, 2 * length);
  for (uint32_t i = 0; i < length; i++) {
    uint8_t byte = ((const uint8_t *)value)[i];
    json.data[json.length++] = digits[byte >> 4];
    json.data[json.length++] = digits[byte & 15];
  }
  bridle_add(&json, "\",\"op\":\"");
  bridle_add(&json, op);
  bridle_add(&json, "\",\"when_version_is\":null}}");
  aici_host_storage_cmd(json.data, json.length);
}

static inline void bridle_set_variable(const char *name, const void *value, uint32_t length) {
  bridle_write_variable(name, value, length, "Set");
}

static inline void bridle_append_variable(const char *name, const void *value, uint32_t length) {
  bridle_write_variable(name, value, length, "Append");
}

static inline uint8_t bridle_hex(char digit) {
  return (uint8_t)(digit <= '9' ? digit - '0' : (digit | 32) - 'a' + 10);
}

/* Its version, from 1, and its value in `into`; 0 if it was never written. */
static inline uint32_t bridle_get_variable(const char *name, struct bridle_text *into) {
  static struct bridle_text json;
  json.length = into->length = 0;
  bridle_add(&json, "{\"ReadVar\":{\"name\":\"");
  bridle_add(&json, name);
  bridle_add(&json, "\"}}");
  bridle_read(&json, aici_host_storage_cmd(json.data, json.length));
  const char *version = bridle_find(json.data, "version"), *value = bridle_find(json.data, "value");
  if (!version || !value || *value++ != '"') return 0;
  uint32_t number;
  bridle_parse_number(version, &number);
  bridle_reserve(into, json.length);
  for (; value[0] != '"' && value[1]; value += 2)
    into->data[into->length++] = (char)(bridle_hex(value[0]) << 4 | bridle_hex(value[1]));
  into->data[into->length] = 0;
  return number;
}

/* -- tools -----------------------------------------------------------------------------------------------------------
 *
 *   struct bridle_call call = bridle_tool("weather", "{\"city\": \"Oslo\"}", 0);
 *   ...
 *   if (!bridle_call_is_done(&call)) return bridle_wait_for(&call);
 *   if (bridle_call_text(&call, &text)) ... the answer ...; else ... why there is none ...
 */

/* A call that is under way, or over. Its variable is this sequence's own, so forks call for themselves. */
struct bridle_call {
  char variable[40]; /* with room for what stands behind it */
  uint32_t length;
};

/* A JSON text of words. */
static inline void bridle_add_quoted(struct bridle_text *text, const char *words) {
  static const char digits[] = "0123456789abcdef";
  bridle_add(text, "\"");
  for (; *words; words++) {
    char escaped[] = {'\\', 'u', '0', '0', digits[(uint8_t)*words >> 4], digits[*words & 15]};
    if (*words == '"' || *words == '\\' || (uint8_t)*words < 32) bridle_add_bytes(text, escaped, sizeof escaped);
    else bridle_add_bytes(text, words, 1);
  }
  bridle_add(text, "\"");
}

static inline const char *bridle_call_variable(struct bridle_call *call, const char *ending) {
  bridle_copy(call->variable + call->length, ending, bridle_length(ending) + 1);
  return call->variable;
}

/* Call a tool; gives a handle at once. `arguments` is a JSON object, 0 for none; 0 milliseconds is the usual time. */
static inline struct bridle_call bridle_tool(const char *name, const char *arguments, uint32_t milliseconds) {
  static uint32_t number;
  static struct bridle_text text;
  struct bridle_call call = {.length = 0};
  text.length = 0;
  bridle_add(&text, "tool:");
  bridle_add_number(&text, aici_host_self_seq_id());
  bridle_add(&text, "-");
  bridle_add_number(&text, number++);
  bridle_copy(call.variable, text.data, call.length = text.length);
  text.length = 0;
  bridle_add(&text, "{\"name\":");
  bridle_add_quoted(&text, name);
  bridle_add(&text, ",\"arguments\":");
  bridle_add(&text, arguments ? arguments : "{}");
  if (milliseconds) {
    bridle_add(&text, ",\"timeout\":");
    bridle_add_real(&text, milliseconds / 1000.0);
  }
  bridle_add(&text, "}");
  bridle_set_variable(bridle_call_variable(&call, ""), text.data, text.length);
  return call;
}

static inline int bridle_call_is_done(struct bridle_call *call) {
  static struct bridle_text answer;
  return bridle_get_variable(bridle_call_variable(call, ":answer"), &answer) != 0;
}

/* Be asked again once it has ended. */
static inline void bridle_wait_for(struct bridle_call *call) {
  static struct bridle_text json;
  json.length = 0;
  bridle_add(&json, "{\"wait\":{\"variable\":");
  bridle_add_quoted(&json, bridle_call_variable(call, ":answer"));
  bridle_add(&json, ",\"newer_than\":0}}");
  bridle_return(&json);
}

/* 1, and its answer in `into`; 0, and there why it has none. A zero stands behind it. */
static inline int bridle_call_text(struct bridle_call *call, struct bridle_text *into) {
  if (bridle_get_variable(bridle_call_variable(call, ":error"), into)) return 0;
  return bridle_get_variable(bridle_call_variable(call, ":answer"), into) != 0;
}

/* Give it up. */
static inline void bridle_cancel(struct bridle_call *call) {
  bridle_set_variable(bridle_call_variable(call, ""), "", 0);
}

#endif
