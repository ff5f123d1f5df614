/* Between the controller interface and QuickJS: the four callbacks, and the native module `aici/host` that the library in
 * `lib/` is written on. What a callback means is decided there; here is only how values cross the border.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include "bridle_controller.h"
#include "library.h"
#include "quickjs.h"

/* JavaScript may use so much of the 512 KB stack before it gets a RangeError. */
enum { MAX_JS_STACK = 192 << 10, PREFETCH = 8 << 10 };

static JSRuntime *runtime;
static JSContext *context;
static JSClassID handle_class;
static JSValue callbacks; /* {prompt, mid, rejected}, from the library */

/* -- no clock: a script must not tell how fast its neighbours are. The build renames the two calls ----------------- */

int no_clock(clockid_t clock, struct timespec *now) {
  (void)clock;
  now->tv_sec = 0;
  now->tv_nsec = 0;
  return 0;
}

int no_time(struct timeval *restrict now, void *restrict zone) {
  (void)zone;
  now->tv_sec = 0;
  now->tv_usec = 0;
  return 0;
}

/* -- bytes of the host -------------------------------------------------------------------------------------------- */

struct bytes {
  uint8_t *data;
  uint32_t length;
};

/* Copies a blob, with a 0 behind it. Freed by the caller. */
static struct bytes read_blob(bridle_blob blob) {
  static uint8_t first[PREFETCH];
  uint32_t length = aici_host_read_blob(blob, first, PREFETCH);
  uint8_t *data = malloc(length + 1);
  if (!data) bridle_fail("out of memory", 13);
  if (length <= PREFETCH)
    memcpy(data, first, length);
  else
    aici_host_read_blob(blob, data, length);
  data[length] = 0;
  return (struct bytes){data, length};
}

static JSValue text_of(JSContext *ctx, bridle_blob blob) {
  struct bytes bytes = read_blob(blob);
  JSValue text = JS_NewStringLen(ctx, (char *)bytes.data, bytes.length);
  free(bytes.data);
  return text;
}

static JSValue buffer_of(JSContext *ctx, bridle_blob blob) {
  struct bytes bytes = read_blob(blob);
  JSValue array = JS_NewUint8ArrayCopy(ctx, bytes.data, bytes.length);
  free(bytes.data);
  return array;
}

static JSValue numbers_of(JSContext *ctx, bridle_blob blob) {
  struct bytes bytes = read_blob(blob);
  JSValue list = JS_NewArray(ctx);
  for (uint32_t i = 0; i < bytes.length / 4; i++)
    JS_SetPropertyUint32(ctx, list, i, JS_NewUint32(ctx, ((uint32_t *)bytes.data)[i]));
  free(bytes.data);
  return list;
}

/* The bytes of a text or a Uint8Array. `*owned` is to be freed with JS_FreeCString if it is not NULL. */
static const char *bytes_from(JSContext *ctx, JSValueConst value, size_t *length, const char **owned) {
  *owned = NULL;
  if (JS_IsString(value)) return *owned = JS_ToCStringLen(ctx, length, value);
  const uint8_t *data = JS_GetUint8Array(ctx, length, value);
  if (!data && JS_IsObject(value)) return NULL;
  if (!data) JS_ThrowTypeError(ctx, "a text or an Uint8Array is needed");
  return (const char *)data;
}

/* A list of tokens as u32. Freed by the caller; NULL with an exception. */
static uint32_t *tokens_from(JSContext *ctx, JSValueConst list, uint32_t *count) {
  int64_t length;
  if (JS_GetLength(ctx, list, &length) < 0) return NULL;
  uint32_t *tokens = malloc(4 * (size_t)length + 4);
  if (!tokens) return JS_ThrowOutOfMemory(ctx), NULL;
  for (int64_t i = 0; i < length; i++) {
    JSValue item = JS_GetPropertyInt64(ctx, list, i);
    int64_t token = -1;
    int failed = JS_IsException(item) || JS_ToInt64(ctx, &token, item) < 0;
    JS_FreeValue(ctx, item);
    if (!failed && (token < 0 || token >= bridle_vocab_size())) {
      JS_ThrowRangeError(ctx, "token %lld is outside the vocabulary of %u", (long long)token, bridle_vocab_size());
      failed = 1;
    }
    if (failed) return free(tokens), NULL;
    tokens[i] = (uint32_t)token;
  }
  *count = (uint32_t)length;
  return tokens;
}

/* -- the native module: text, tokens, variables ------------------------------------------------------------------- */

#define NATIVE(name) \
  static JSValue name(JSContext *ctx, JSValueConst self, int argc, JSValueConst *argv)

NATIVE(js_print) {
  size_t length;
  const char *text = JS_ToCStringLen(ctx, &length, argv[0]);
  if (!text) return JS_EXCEPTION;
  struct bridle_span span = {text, length};
  uint32_t written;
  bridle_fd_write(1, &span, 1, &written);
  JS_FreeCString(ctx, text);
  return JS_UNDEFINED;
}

NATIVE(js_tokenize) {
  size_t length;
  const char *owned, *text = bytes_from(ctx, argv[0], &length, &owned);
  if (!text) return JS_EXCEPTION;
  JSValue tokens = numbers_of(ctx, aici_host_tokenize(text, length));
  if (owned) JS_FreeCString(ctx, owned);
  return tokens;
}

NATIVE(js_detokenize) {
  uint32_t count, *tokens = tokens_from(ctx, argv[0], &count);
  if (!tokens) return JS_EXCEPTION;
  JSValue bytes = buffer_of(ctx, bridle_detokenize(tokens, count));
  free(tokens);
  return bytes;
}

NATIVE(js_encode) {
  size_t length;
  const char *text = JS_ToCStringLen(ctx, &length, argv[0]);
  if (!text) return JS_EXCEPTION;
  JSValue bytes = JS_NewUint8ArrayCopy(ctx, (const uint8_t *)text, length);
  JS_FreeCString(ctx, text);
  return bytes;
}

NATIVE(js_decode) {
  size_t length;
  const uint8_t *bytes = JS_GetUint8Array(ctx, &length, argv[0]);
  return bytes || !length ? JS_NewStringLen(ctx, (const char *)bytes, length) : JS_EXCEPTION;
}

NATIVE(js_storage) {
  size_t length;
  const char *command = JS_ToCStringLen(ctx, &length, argv[0]);
  if (!command) return JS_EXCEPTION;
  JSValue answer = text_of(ctx, aici_host_storage_cmd(command, length));
  JS_FreeCString(ctx, command);
  return answer;
}

NATIVE(js_render_chat) {
  size_t length;
  const char *conversation = JS_ToCStringLen(ctx, &length, argv[0]);
  if (!conversation) return JS_EXCEPTION;
  JSValue answer = text_of(ctx, bridle_render_chat(conversation, length));
  JS_FreeCString(ctx, conversation);
  return answer;
}

NATIVE(js_config) {
  size_t length;
  const char *name = JS_ToCStringLen(ctx, &length, argv[0]);
  if (!name) return JS_EXCEPTION;
  uint32_t value = aici_host_get_config(name, length);
  JS_FreeCString(ctx, name);
  return JS_NewUint32(ctx, value);
}

NATIVE(js_fail) {
  size_t length;
  const char *text = JS_ToCStringLen(ctx, &length, argv[0]);
  bridle_fail(text ? text : "", text ? length : 0);
}

NATIVE(js_argument) { return text_of(ctx, aici_host_module_arg()); }
NATIVE(js_seq_id) { return JS_NewUint32(ctx, aici_host_self_seq_id()); }
NATIVE(js_eos) { return JS_NewUint32(ctx, aici_host_eos_token()); }
NATIVE(js_vocab_size) { return JS_NewUint32(ctx, bridle_vocab_size()); }

/* The name of a mask; 0 if it allows nothing. */
NATIVE(js_bias) {
  size_t length, needed = 4 * ((bridle_vocab_size() + 31) / 32);
  const uint8_t *bits = JS_GetUint8Array(ctx, &length, argv[0]);
  if (!bits) return JS_EXCEPTION;
  if (length < needed) return JS_ThrowRangeError(ctx, "a mask of %zu bytes", length);
  for (size_t i = 0; i < needed; i++)
    if (bits[i]) return JS_NewUint32(ctx, aici_host_return_logit_bias((const uint32_t *)bits));
  return JS_NewUint32(ctx, 0);
}

/* Runs what waits for promises that were settled. */
NATIVE(js_drain) {
  JSContext *where;
  int more;
  while ((more = JS_ExecutePendingJob(JS_GetRuntime(ctx), &where)) > 0)
    ;
  return more < 0 ? JS_EXCEPTION : JS_UNDEFINED;
}

/* Compiles the user's script as module `main` and runs it up to its first wait; gives a promise. */
NATIVE(js_run) {
  size_t length;
  const char *text = JS_ToCStringLen(ctx, &length, argv[0]);
  if (!text) return JS_EXCEPTION;
  JSValue done = JS_Eval(ctx, text, length, "main", JS_EVAL_TYPE_MODULE);
  JS_FreeCString(ctx, text);
  return done;
}

/* -- constraints: an object whose end frees the handle ------------------------------------------------------------ */

static void free_handle(JSRuntime *rt, JSValueConst value) {
  uint32_t handle = (uint32_t)(uintptr_t)JS_GetOpaque(value, handle_class);
  if (handle) bridle_constraint_free(handle);
}

static const JSClassDef handle_definition = {"Handle", .finalizer = free_handle};

static uint32_t handle_from(JSContext *ctx, JSValueConst value) {
  return (uint32_t)(uintptr_t)JS_GetOpaque2(ctx, value, handle_class);
}

NATIVE(js_constraint) {
  size_t length;
  const char *spec = JS_ToCStringLen(ctx, &length, argv[0]);
  if (!spec) return JS_EXCEPTION;
  uint32_t handle = bridle_constraint_new("constraint", 10, spec, length);
  JS_FreeCString(ctx, spec);
  JSValue object = JS_NewObjectClass(ctx, handle_class);
  if (JS_IsException(object)) bridle_constraint_free(handle);
  else JS_SetOpaque(object, (void *)(uintptr_t)handle);
  return object;
}

NATIVE(js_commit) {
  uint32_t count, handle = handle_from(ctx, argv[0]);
  uint32_t *tokens = handle ? tokens_from(ctx, argv[1], &count) : NULL;
  if (!tokens) return JS_EXCEPTION;
  JSValue taken = JS_NewUint32(ctx, bridle_constraint_commit(handle, tokens, count));
  free(tokens);
  return taken;
}

NATIVE(js_rollback) {
  uint32_t count, handle = handle_from(ctx, argv[0]);
  if (!handle || JS_ToUint32(ctx, &count, argv[1])) return JS_EXCEPTION;
  return JS_NewUint32(ctx, bridle_constraint_rollback(handle, count));
}

#define OF_HANDLE(name, result)                       \
  NATIVE(name) {                                      \
    uint32_t handle = handle_from(ctx, argv[0]);      \
    return handle ? (result) : JS_EXCEPTION;          \
  }

OF_HANDLE(js_allow, JS_NewUint32(ctx, bridle_constraint_allow(handle)))
OF_HANDLE(js_mask, buffer_of(ctx, bridle_constraint_mask(handle)))
OF_HANDLE(js_forced, numbers_of(ctx, bridle_constraint_ff(handle)))
OF_HANDLE(js_status, JS_NewUint32(ctx, bridle_constraint_status(handle)))
OF_HANDLE(js_problem, text_of(ctx, bridle_constraint_error(handle)))

static const JSCFunctionListEntry functions[] = {
    JS_CFUNC_DEF("print", 1, js_print),         JS_CFUNC_DEF("tokenize", 1, js_tokenize),
    JS_CFUNC_DEF("detokenize", 1, js_detokenize), JS_CFUNC_DEF("encode", 1, js_encode),
    JS_CFUNC_DEF("decode", 1, js_decode),       JS_CFUNC_DEF("storage", 1, js_storage),
    JS_CFUNC_DEF("getConfig", 1, js_config),    JS_CFUNC_DEF("fail", 1, js_fail),
    JS_CFUNC_DEF("argument", 0, js_argument),   JS_CFUNC_DEF("selfSeqId", 0, js_seq_id),
    JS_CFUNC_DEF("eosToken", 0, js_eos),        JS_CFUNC_DEF("vocabSize", 0, js_vocab_size),
    JS_CFUNC_DEF("bias", 1, js_bias),           JS_CFUNC_DEF("drain", 0, js_drain),
    JS_CFUNC_DEF("run", 1, js_run),             JS_CFUNC_DEF("renderChat", 1, js_render_chat),
    JS_CFUNC_DEF("constraint", 1, js_constraint), JS_CFUNC_DEF("commit", 2, js_commit),
    JS_CFUNC_DEF("rollback", 2, js_rollback),   JS_CFUNC_DEF("allow", 1, js_allow),
    JS_CFUNC_DEF("mask", 1, js_mask),           JS_CFUNC_DEF("forced", 1, js_forced),
    JS_CFUNC_DEF("status", 1, js_status),       JS_CFUNC_DEF("problem", 1, js_problem),
};
enum { NUM_FUNCTIONS = sizeof functions / sizeof *functions };

static int fill_native_module(JSContext *ctx, JSModuleDef *module) {
  return JS_SetModuleExportList(ctx, module, functions, NUM_FUNCTIONS);
}

/* -- modules and rejections --------------------------------------------------------------------------------------- */

static JSModuleDef *load_module(JSContext *ctx, const char *name, void *unused) {
  (void)unused;
  for (const struct library_file *file = library; file->name; file++) {
    if (strcmp(file->name, name)) continue;
    JSValue compiled = JS_Eval(ctx, file->text, strlen(file->text), name,
                               JS_EVAL_TYPE_MODULE | JS_EVAL_FLAG_COMPILE_ONLY);
    if (JS_IsException(compiled)) return NULL;
    JSModuleDef *module = JS_VALUE_GET_PTR(compiled);
    JS_FreeValue(ctx, compiled); /* the context holds it */
    return module;
  }
  JS_ThrowReferenceError(ctx, "there is no module '%s'; a script can import 'aici' and nothing else", name);
  return NULL;
}

static char *keep_name(JSContext *ctx, const char *base, const char *name, void *unused) {
  (void)base;
  (void)unused;
  return js_strdup(ctx, name);
}

static void track_rejection(JSContext *ctx, JSValueConst promise, JSValueConst reason, bool is_handled, void *unused) {
  (void)unused;
  if (JS_IsUndefined(callbacks)) return; /* `set_up` looks by itself */
  JSValue function = JS_GetPropertyStr(ctx, callbacks, "rejected");
  JSValueConst arguments[] = {promise, reason, JS_NewBool(ctx, is_handled)};
  JS_FreeValue(ctx, JS_Call(ctx, function, callbacks, 3, arguments));
  JS_FreeValue(ctx, function);
}

/* -- interruption: asked every ten thousand jumps and calls; then the running function throws what cannot be caught -- */

static int must_stop(JSRuntime *rt, void *unused) {
  static int is_told; /* after that the last words are formed */
  (void)rt;
  (void)unused;
  if (!is_told) is_told = (int)bridle_is_time_up();
  else return 0;
  return is_told;
}

/* -- callbacks ---------------------------------------------------------------------------------------------------- */

/* The end: the library itself threw, or memory is so short that nothing can be told. */
static _Noreturn void give_up(void) {
  JSValue error = JS_GetException(context);
  size_t length = 0;
  if (JS_IsUncatchableError(error)) { /* `must_stop`: where was it? */
    JSValue function = JS_GetPropertyStr(context, callbacks, "place");
    error = JS_Call(context, function, callbacks, 1, (JSValueConst[]){error});
  }
  const char *text = JS_ToCStringLen(context, &length, error);
  if (!text) bridle_fail("out of memory", 13);
  bridle_fail(text, length);
}

/* Hands the running callback's argument to the library and its answer, a text, to the host. */
static void answer(const char *name) {
  JS_UpdateStackTop(runtime);
  JSValue function = JS_GetPropertyStr(context, callbacks, name);
  JSValue argument = text_of(context, aici_host_process_arg());
  JSValue result = JS_Call(context, function, callbacks, 1, (JSValueConst[]){argument});
  JS_FreeValue(context, function);
  JS_FreeValue(context, argument);
  size_t length;
  const char *text = JS_ToCStringLen(context, &length, result);
  if (!text) give_up();
  aici_host_return_process_result(text, length);
  JS_FreeCString(context, text);
  JS_FreeValue(context, result);
}

/* Everything that does not depend on the script. The module that is shipped was saved behind this point. */
static void set_up(void) {
  runtime = JS_NewRuntime();
  context = JS_NewContext(runtime);
  callbacks = JS_UNDEFINED;
  JS_SetMaxStackSize(runtime, MAX_JS_STACK);
  JS_SetModuleLoaderFunc(runtime, keep_name, load_module, NULL);
  JS_SetHostPromiseRejectionTracker(runtime, track_rejection, NULL);
  JS_NewClassID(runtime, &handle_class);
  JS_NewClass(runtime, handle_class, &handle_definition);
  JSModuleDef *native = JS_NewCModule(context, "aici/host", fill_native_module);
  JS_AddModuleExportList(context, native, functions, NUM_FUNCTIONS);
  static const char boot[] = "import { callbacks } from 'aici/main'; globalThis.__callbacks = callbacks;";
  JSValue done = JS_Eval(context, boot, sizeof boot - 1, "boot", JS_EVAL_TYPE_MODULE);
  JS_FreeValue(context, js_drain(context, JS_UNDEFINED, 0, NULL));
  if (JS_PromiseState(context, done) == JS_PROMISE_REJECTED) JS_Throw(context, JS_PromiseResult(context, done));
  if (JS_PromiseState(context, done) != JS_PROMISE_FULFILLED) give_up();
  JS_FreeValue(context, done);
  JSValue global = JS_GetGlobalObject(context);
  callbacks = JS_GetPropertyStr(context, global, "__callbacks");
  JSAtom name = JS_NewAtom(context, "__callbacks");
  JS_DeleteProperty(context, global, name, 0);
  JS_FreeAtom(context, name);
  JS_FreeValue(context, global);
  JS_RunGC(runtime);
  JS_SetInterruptHandler(runtime, must_stop, NULL);
}

void aici_init(void) {
  if (!context) set_up();
}

/* The script runs when the prompt is known: labels and the like count from its end. */
uint32_t aici_create(void) { return 1; }

void aici_init_prompt(uint32_t handle) {
  (void)handle;
  answer("prompt");
}

void aici_mid_process(uint32_t handle) {
  (void)handle;
  answer("mid");
}
