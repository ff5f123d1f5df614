// Where the interpreter of JSON programs begins.
import * as host from "aici/host"
import { mid, prompt, rejected, setProgram } from "aici/driver"
import { place } from "aici/text"
import { run } from "decl/machine"
import { parse } from "decl/program"

setProgram("DeclCtrl", () => run(parse(host.argument())))

export const callbacks = { mid, place, prompt, rejected }
