// Where an interpreter of scripts begins: what the shim calls, and what a script can use.
import { mid, prompt, rejected } from "aici/driver"
import { place } from "aici/text"
import { withVectors } from "aici/vectors"
import "aici/globals"
import "aici"
import "_aici"

export const callbacks = { mid: withVectors(mid), place, prompt, rejected }
