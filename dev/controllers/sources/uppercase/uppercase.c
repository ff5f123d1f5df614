/* An upper-case ASCII letter at every fourth byte of the text, any bytes between; fifty tokens at most.
 *
 * Shows a constraint on bytes over a vocabulary of tokens: which of them fit is found by a walk over their trie. */

#include "bridle_steps.h"

enum { PERIOD = 4, MAX_TOKENS = 50 };

static const char default_prompt[] = "Here is a tweet:\n";

static struct bridle_vocabulary vocabulary;
static struct bridle_set set;
static uint32_t num_tokens, num_bytes;

static int allows(void *context, uint32_t depth, uint8_t byte) {
  (void)context;
  return (num_bytes + depth) % PERIOD || (byte >= 'A' && byte <= 'Z');
}

void aici_init(void) {}

uint32_t aici_create(void) {
  vocabulary = bridle_read_vocabulary();
  set = bridle_new_set();
  return 0;
}

/* A prompt of a start token, or of nothing, is none: there is one of our own. */
void aici_init_prompt(uint32_t handle) {
  (void)handle;
  struct bridle_step step = bridle_read_step();
  struct bridle_text prompt = {0};
  bridle_add_bytes(&prompt, step.tokens, 4 * step.num_tokens);
  if (step.num_tokens <= 1) {
    struct bridle_tokens words = bridle_tokenize(default_prompt);
    bridle_add_bytes(&prompt, words.data, 4 * words.count);
  }
  bridle_return_prompt((bridle_token *)(void *)prompt.data, prompt.length / 4);
}

void aici_mid_process(uint32_t handle) {
  (void)handle;
  struct bridle_step step = bridle_read_step();
  for (uint32_t i = 0; i < step.num_tokens; i++) {
    uint32_t size;
    bridle_token_bytes(&vocabulary, step.tokens[i], &size);
    num_bytes += size;
  }
  num_tokens += step.num_tokens;
  if (num_tokens >= MAX_TOKENS || bridle_has_token(&step, vocabulary.eos)) {
    bridle_stop();
    return;
  }
  bridle_clear(&set);
  bridle_walk(&vocabulary, &set, allows, 0);
  if (num_tokens) bridle_allow(&set, vocabulary.eos);
  bridle_sample(bridle_mask_of(&set));
}
