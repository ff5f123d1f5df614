/* "Yes" or "No", and nothing else. The prompt is the question; the argument is not read.
 *
 * Tokenizers split words as they like, so the words are followed token by token: each token is one that goes on in a
 * word, and it is over when none does. */

#include "bridle_steps.h"

enum { NUM_WORDS = 2, MAX_TOKENS = 16 };

struct word {
  bridle_token tokens[MAX_TOKENS];
  uint32_t count; /* 0: it is not what was written */
};

static struct word words[NUM_WORDS];
static struct bridle_set allowed;
static uint32_t written;

static void spell(struct word *word, const char *text) {
  struct bridle_tokens tokens = bridle_tokenize(text);
  word->count = tokens.count < MAX_TOKENS ? tokens.count : MAX_TOKENS;
  bridle_copy(word->tokens, tokens.data, 4 * word->count);
}

static void write(bridle_token token) {
  for (struct word *word = words; word < words + NUM_WORDS; word++)
    if (written >= word->count || word->tokens[written] != token) word->count = 0;
  written++;
}

void aici_init(void) {}

uint32_t aici_create(void) {
  spell(words, "Yes");
  spell(words + 1, "No");
  allowed = bridle_new_set();
  return 0;
}

void aici_init_prompt(uint32_t handle) {
  (void)handle;
  bridle_keep_prompt();
}

void aici_mid_process(uint32_t handle) {
  (void)handle;
  struct bridle_step step = bridle_read_step();
  for (uint32_t i = 0; i < step.num_tokens; i++) write(step.tokens[i]);
  int is_over = 1;
  bridle_clear(&allowed);
  for (struct word *word = words; word < words + NUM_WORDS; word++) {
    if (written >= word->count) continue;
    bridle_allow(&allowed, word->tokens[written]);
    is_over = 0;
  }
  if (is_over) bridle_stop();
  else bridle_sample(bridle_mask_of(&allowed));
}
