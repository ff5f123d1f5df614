"""Numbers of system calls on x86-64 and ARM64, grouped by permission in a sandboxed process.

Each entry is a name, its number on x86-64 and its number on ARM64; `-` means that the architecture has no such call.
The numbers come from Linux's headers. The lists come from a trace of the sandboxed processes in the test suite. Calls
that only other versions of the C library make were added.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import NamedTuple

_PERMITTED = """
    read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, close 3 57, close_range 436 436,
    fstat 5 80, newfstatat 262 79, lseek 8 62, fcntl 72 25, dup 32 23, dup2 33 -, dup3 292 24, pipe2 293 59,
    ftruncate 77 46, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create1 291 20, epoll_ctl 233 21,
    epoll_wait 232 -, epoll_pwait 281 22, eventfd2 290 19, timerfd_create 283 85, timerfd_settime 286 86, mmap 9 222,
    munmap 11 215, mremap 25 216, mprotect 10 226, madvise 28 233, brk 12 214, msync 26 227, mincore 27 232,
    mlock 149 228, munlock 150 229, memfd_create 319 279, membarrier 324 283, futex 202 98, futex_waitv 449 449,
    set_robust_list 273 99, get_robust_list 274 100, set_tid_address 218 96, rseq 334 293, arch_prctl 158 -,
    rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigtimedwait 128 137, sigaltstack 131 132,
    restart_syscall 219 128, tgkill 234 131, clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115,
    nanosleep 35 101, gettimeofday 96 169, time 201 -, getitimer 36 102, setitimer 38 103, times 100 153,
    timer_create 222 107, timer_settime 223 110, timer_delete 226 111, getpid 39 172, gettid 186 178, getppid 110 173,
    getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getpgrp 111 -, getpgid 121 155, getsid 124 156,
    uname 63 160, sysinfo 99 179, getcpu 309 168, getrandom 318 278, getrlimit 97 163, getrusage 98 165,
    sched_yield 24 124, sched_getaffinity 204 123, sched_getparam 143 121, sched_getscheduler 145 120,
    sched_get_priority_max 146 125, sched_get_priority_min 147 126, getpriority 140 141, sendto 44 206,
    recvfrom 45 207, sendmsg 46 211, recvmsg 47 212, sendmmsg 307 269, recvmmsg 299 243, shutdown 48 210,
    getsockopt 55 209, setsockopt 54 208, getsockname 51 204, getpeername 52 205, access 21 -, faccessat 269 48,
    faccessat2 439 439, stat 4 -, lstat 6 -, statx 332 291, readlink 89 -, readlinkat 267 78, getdents64 217 61,
    getcwd 79 17, fadvise64 221 223, exit 60 93, exit_group 231 94, sched_setaffinity 203 122
"""
#: Calls that are permitted only with certain arguments.
_CHECKED = """
    prlimit64 302 261, open 2 -, openat 257 56, clone 56 220, prctl 157 167, ioctl 16 29
"""
#: Calls for processes that may start others, which inherit all restrictions.
_FORKING = """
    fork 57 -, vfork 58 -, wait4 61 260, waitid 247 95, pidfd_open 434 434
"""
#: Calls that no correct version of these processes makes. A process that makes one has broken out of the first sandbox.
_FATAL = """
    execve 59 221, execveat 322 281, ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271,
    process_madvise 440 440, kcmp 312 272, pidfd_getfd 438 438, pidfd_send_signal 424 424, kill 62 129, tkill 200 130,
    socket 41 198, socketpair 53 199, connect 42 203, bind 49 200, listen 50 201, accept 43 202, accept4 288 242,
    mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, setns 308 268, unshare 272 97, move_mount 429 429,
    open_tree 428 428, fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433, mount_setattr 442 442,
    init_module 175 105, finit_module 313 273, delete_module 176 106, kexec_load 246 104, kexec_file_load 320 294,
    reboot 169 142, swapon 167 224, swapoff 168 225, acct 163 89, quotactl 179 60, bpf 321 280,
    perf_event_open 298 241, userfaultfd 323 282, io_uring_setup 425 425, io_uring_enter 426 426,
    io_uring_register 427 427, fanotify_init 300 262, keyctl 250 219, add_key 248 217, request_key 249 218,
    name_to_handle_at 303 264, open_by_handle_at 304 265, personality 135 92, iopl 172 -, ioperm 173 -,
    modify_ldt 154 -, syslog 103 116, setuid 105 146, setgid 106 144, setreuid 113 145, setregid 114 143,
    setresuid 117 147, setresgid 119 149, setfsuid 122 151, setfsgid 123 152, setgroups 116 159, capset 126 91,
    settimeofday 164 170, clock_settime 227 112, adjtimex 159 171, clock_adjtime 305 266, sethostname 170 161,
    setdomainname 171 162, unlink 87 -, unlinkat 263 35, rename 82 -, renameat 264 38, renameat2 316 276, link 86 -,
    linkat 265 37, symlink 88 -, symlinkat 266 36, mkdir 83 -, mkdirat 258 34, rmdir 84 -, mknod 133 -,
    mknodat 259 33, creat 85 -, truncate 76 45, chmod 90 -, fchmod 91 52, fchmodat 268 53, chown 92 -, fchown 93 55,
    lchown 94 -, fchownat 260 54, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14, shmget 29 194,
    shmat 30 196, shmctl 31 195, msgget 68 186, semget 64 190, mq_open 240 180, memfd_secret 447 447, vhangup 153 58
"""


class SystemCalls(NamedTuple):
    """Numbers of system calls by name on one architecture. `audit` is the kernel's number for the architecture."""

    audit: int
    permitted: Mapping[str, int]
    checked: Mapping[str, int]
    forking: Mapping[str, int]
    fatal: Mapping[str, int]


def system_calls(machine: str | None = None) -> SystemCalls | None:
    """Return this machine's table, or None for an architecture without one."""
    known = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}.get(machine or platform.machine())
    if known is None:
        return None
    column, audit = known
    return SystemCalls(audit, *(_column(text, column) for text in (_PERMITTED, _CHECKED, _FORKING, _FATAL)))


def _column(text: str, column: int) -> dict[str, int]:
    entries = [entry.split() for entry in text.split(",")]
    return {name: int(numbers[column]) for name, *numbers in entries if numbers[column] != "-"}
