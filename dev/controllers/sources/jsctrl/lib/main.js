// Where an interpreter of scripts begins: what the shim calls, and what a script can use.
import { mid, prompt, rejected } from "aici/driver"
import { place } from "aici/text"
import "aici/globals"
import "aici"
import "_aici"

export const callbacks = { mid, place, prompt, rejected }
