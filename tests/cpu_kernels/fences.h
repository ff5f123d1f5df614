// Memory between pages that nobody may touch, for machines without a sanitizer of addresses: what is read or written one byte
// beyond its end stops the program.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { PAGE = 4096, MOST = 1 << 12 };
static struct { char *begin; size_t pages; char *given; } fields[MOST];
static int num_fields;

static void *fenced(size_t n) {
    const size_t pages = (n + PAGE - 1) / PAGE;
    char *begin = mmap(NULL, (pages + 2) * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (num_fields == MOST || begin == MAP_FAILED || (pages && mprotect(begin + PAGE, pages * PAGE, PROT_READ | PROT_WRITE))) {
        printf("no memory with fences\n");
        exit(1);
    }
    char *given = begin + (pages + 1) * PAGE - n;
    fields[num_fields].begin = begin; fields[num_fields].pages = pages; fields[num_fields].given = given;
    num_fields++;
    return given;
}
static void unfenced(void *p) {
    for (int i = num_fields; p && i--;) {
        if (fields[i].given != p) continue;
        munmap(fields[i].begin, (fields[i].pages + 2) * PAGE);
        fields[i] = fields[--num_fields];
        return;
    }
}
#define malloc fenced
#define free unfenced
