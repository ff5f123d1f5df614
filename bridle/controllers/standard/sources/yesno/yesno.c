/* One token, "Yes" or "No": the smallest useful controller. The prompt is the question; the argument is not read. */

#include "bridle_steps.h"

static struct bridle_set answers;

void aici_init(void) {}

uint32_t aici_create(void) {
  answers = bridle_new_set();
  bridle_allow(&answers, *bridle_tokenize("Yes").data);
  bridle_allow(&answers, *bridle_tokenize("No").data);
  return 0;
}

void aici_init_prompt(uint32_t handle) {
  (void)handle;
  bridle_keep_prompt();
}

void aici_mid_process(uint32_t handle) {
  (void)handle;
  struct bridle_step step = bridle_read_step();
  if (step.num_tokens) bridle_stop();
  else bridle_sample(bridle_mask_of(&answers));
}
