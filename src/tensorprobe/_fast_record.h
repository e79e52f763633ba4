/* A plain call from its beginning to its end, as `Describing` records it: to the same message, byte for byte in the record.
 *
 * Python is asked for what is rare, by methods of `side` (quick.py). Whatever fails is the tool's failure, unless the program
 * raised it into our code: `session.tool_failed` tells which.
 */
static PyObject *s_is_quick, *s_name, *s_mutates, *s_dict, *s_recompute, *s_modules, *s_calls, *s_phase, *s_ordinal, *s_outer_stack, *s_region,
    *s_out, *s_numbers, *s_recorded, *s_blocks, *s_queue, *s_microbatch, *s_number, *s_ids, *s_set_aside, *s_failure, *s_closed, *s_out_bytes, *s_drain, *s_pipe, *s_fd, *s_last_sent, *s_stay_warm, *s_edges,
    *s_follow, *s_learn, *s_discard, *s_tool_failed, *s_class_name;

/* Where a call is made. What is borrowed is held by the thread's state or by the session while the call runs. */
typedef struct {
    PyObject *name, *module, *parent, *phase, *microbatch, *stack, *edges; /* owned */
    int64_t number, ordinal, repeat; /* number -1: the name has it, and the direction */
    int64_t start;
    int handed_over;
    Open open;
} Call;

static void drop_call(Call *call) {
    PyObject **owned[] = {&call->name, &call->module, &call->parent, &call->phase, &call->microbatch, &call->stack, &call->edges,
                          &call->open.watched, &call->open.waiting, &call->open.others, &call->open.known};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) Py_CLEAR(*owned[i]);
    drop_buffer(&call->open.arguments);
    drop_buffer(&call->open.slots);
    drop_buffer(&call->open.tokens);
}

#define WARM_BYTES (48 << 20) /* as in writer.py */

/* The last entry of a list, as a new reference; NULL without an error where it is empty. */
static PyObject *last_of(PyObject *list) {
    const Py_ssize_t n = list != NULL && PyList_Check(list) ? PyList_Size(list) : 0;
    PyObject *last = n > 0 ? PyList_GetItem(list, n - 1) : NULL;
    Py_XINCREF(last);
    return last;
}

static PyObject *entry_of(PyObject *dict, PyObject *key) { /* borrowed; NULL without an error when it is absent or None */
    PyObject *value = PyDict_GetItemWithError(dict, key);
    return value == Py_None ? NULL : value;
}

/* ---- the message */

static int put_pieces(Buffer *b, PyObject *pieces) {
    const Py_ssize_t n = PyList_Size(pieces);
    put_array(b, (size_t)n);
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *piece = PyList_GetItem(pieces, i);
        if (!PyTuple_Check(piece) || PyTuple_Size(piece) != 4) return PyErr_SetString(PyExc_TypeError, "a piece has four fields"), -1;
        put_array(b, 4);
        for (int field = 0; field < 3; field++) put_number(b, PyLong_AsLongLong(PyTuple_GetItem(piece, field)));
        put_bool(b, PyTuple_GetItem(piece, 3) == Py_True);
    }
    return PyErr_Occurred() ? -1 : 0;
}

static int put_event(Buffer *b, const Call *call, PyObject *raised) {
    char direction[40];
    Py_ssize_t n;
    const char *name = PyUnicode_AsUTF8AndSize(call->name, &n);
    if (name == NULL) return -1;
    const Open *open = &call->open;
    put_map(b, 1 + (open->arguments.used != 0) + (call->repeat != 0) + (call->module != NULL) + (call->parent != NULL) + (call->stack != NULL) + (call->ordinal != 0) + (call->phase != NULL) +
                   (call->microbatch != NULL) + (raised != NULL) + open->has_kwargs + (open->n_slots != 0));
    PUT_KEY(b, "name");
    size_t m = call->number < 0 ? 0 : put_digits(direction, '.', call->number);
    if (m) memcpy(direction + m, ".forward", 8), m += 8;
    if ((size_t)n + m < 32) put_byte(b, 0xa0 | (unsigned)((size_t)n + m));
    else put_wide(b, 0xdb, (size_t)n + m, 4);
    put_bytes(b, name, (size_t)n);
    put_bytes(b, direction, m);
    if (call->module != NULL) { PUT_KEY(b, "module"); if (put_unicode(b, call->module)) return -1; }
    if (call->parent != NULL) { PUT_KEY(b, "parent"); if (put_unicode(b, call->parent)) return -1; }
    if (call->stack != NULL) { PUT_KEY(b, "stack"); put_number(b, PyLong_AsLongLong(call->stack)); }
    if (call->ordinal != 0) { PUT_KEY(b, "thread"); put_number(b, call->ordinal); }
    if (call->repeat != 0) { PUT_KEY(b, "repeat"); put_number(b, call->repeat); }
    if (call->phase != NULL) { PUT_KEY(b, "phase"); if (put_unicode(b, call->phase)) return -1; }
    if (call->microbatch != NULL) { PUT_KEY(b, "microbatch"); put_number(b, PyLong_AsLongLong(call->microbatch)); }
    if (raised != NULL) { PUT_KEY(b, "raised"); if (put_unicode(b, raised)) return -1; }
    put_bytes(b, open->arguments.bytes, open->arguments.used);
    if (open->n_slots) {
        PUT_KEY(b, "slots");
        put_array(b, open->n_slots);
        put_bytes(b, open->slots.bytes, open->slots.used);
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* `RunWriter.send`, under its lock: -1 on error. From the first line on that changes the writer, the frame is sent. */
static int send_frame(Recording *r, const Buffer *frame, int *handed_over) {
    PyObject *writer = r->parts[R_WRITER], *failure = PyObject_GetAttr(writer, s_failure), *unsent = NULL, *data = NULL, *done = NULL;
    const int closed = failure == NULL ? -1 : failure != Py_None || flag_of(writer, s_closed) == 1;
    Py_XDECREF(failure);
    if (closed || PyErr_Occurred()) return closed < 0 || PyErr_Occurred() ? -1 : 0;
    unsent = PyObject_GetAttr(writer, s_out_bytes);
    int failed = unsent == NULL;
    if (!failed && !(PyBytes_Check(unsent) && PyBytes_Size(unsent) == 0)) { /* the program raised an exception into the last one */
        done = PyObject_CallMethodObjArgs(writer, s_drain, NULL);
        failed = done == NULL;
        Py_XDECREF(done);
    }
    Py_XDECREF(unsent);
    PyObject *pipe = failed ? NULL : PyObject_GetAttr(writer, s_pipe), *number = pipe == NULL ? NULL : PyObject_GetAttr(pipe, s_fd);
    PyObject *pieces = number == NULL ? NULL : PyList_New(0);
    failed = pieces == NULL || PyObject_SetAttr(writer, s_pieces, pieces) || PyObject_SetAttr(writer, s_last_sent, Py_None);
    if (!failed) {
        const int fd = (int)PyLong_AsLong(number);
        size_t written = 0;
        *handed_over = 1;
#if defined(__unix__) || defined(__APPLE__)
        ssize_t n;
        Py_BEGIN_ALLOW_THREADS
        n = fd < 0 ? -1 : write(fd, frame->bytes, frame->used);
        Py_END_ALLOW_THREADS
        if (n > 0) written = (size_t)n;
#endif
        if (written < frame->used) { /* a signal, or nobody reads any more: Python knows what to do */
            data = PyBytes_FromStringAndSize((char *)frame->bytes + written, (Py_ssize_t)(frame->used - written));
            failed = data == NULL || PyObject_SetAttr(writer, s_out_bytes, data);
            done = failed ? NULL : PyObject_CallMethodObjArgs(writer, s_drain, NULL);
            failed = done == NULL;
            Py_XDECREF(done);
            Py_XDECREF(data);
        }
    }
    if (!failed && r->c->state[HEAD] % r->c->ring_size > WARM_BYTES) {
        done = PyObject_CallMethodObjArgs(writer, s_stay_warm, NULL);
        failed = done == NULL;
        Py_XDECREF(done);
    }
    Py_XDECREF(pieces);
    Py_XDECREF(number);
    Py_XDECREF(pipe);
    return failed ? -1 : 0;
}

/* Whether the call has to wait in Python: statistics on a device are fetched later. 1 or 0, -1 on error. */
static int has_to_wait(Recording *r, const Open *open) {
    PyObject *queue = PyObject_GetAttr(r->parts[R_SINK], s_queue);
    if (queue == NULL) return -1;
    const int waits = open->waiting != NULL || (PyList_Check(queue) && PyList_Size(queue) > 0);
    Py_DECREF(queue);
    return waits;
}

/* Hand the call over to the recorder, with the pieces in the ring that it does not know of yet. */
static int send_call(Recording *r, Call *call, PyObject *raised) {
    Buffer event = {0}, frame = {0};
    int failed = put_event(&event, call, raised);
    const int waits = failed ? -1 : has_to_wait(r, &call->open);
    if (waits == 1) {
        PyObject *bytes = PyBytes_FromStringAndSize((char *)event.bytes, (Py_ssize_t)event.used);
        PyObject *done = bytes == NULL ? NULL : PyObject_CallMethodObjArgs(r->parts[R_SIDE], s_set_aside, bytes, call->open.waiting == NULL ? Py_None : call->open.waiting, NULL);
        call->handed_over = done != NULL;
        failed = done == NULL;
        Py_XDECREF(bytes);
        Py_XDECREF(done);
    } else if (waits < 0 || lock_writer(r)) {
        failed = 1;
    } else {
        PyObject *pieces = PyObject_GetAttr(r->parts[R_WRITER], s_pieces);
        put_bytes(&frame, "\0\0\0\0", 4);
        put_array(&frame, 2);
        failed = pieces == NULL || !PyList_Check(pieces) || put_pieces(&frame, pieces);
        Py_XDECREF(pieces);
        put_bytes(&frame, event.bytes, event.used);
        if (event.failed || frame.failed || call->open.slots.failed || call->open.arguments.failed || call->open.tokens.failed) {
            if (!PyErr_Occurred()) PyErr_NoMemory();
            failed = 1;
        }
        if (!failed) {
            for (int i = 0; i < 4; i++) frame.bytes[i] = (unsigned char)((frame.used - 4) >> 8 * i);
            failed = send_frame(r, &frame, &call->handed_over);
        }
        unlock_writer(r);
    }
    drop_buffer(&event);
    drop_buffer(&frame);
    return failed ? -1 : 0;
}

/* ---- from the beginning to the end */

/* The number of the user's stack, as a new reference. */
static PyObject *number_stack(Recording *r, PyObject *outer) {
    PyObject *book = r->parts[R_STACKS], *frame = (PyObject *)PyEval_GetFrame(), *nothing = PyBytes_FromStringAndSize(NULL, 0), *number = NULL;
    const int inside = outer != NULL && PyTuple_Check(outer) && PyTuple_Size(outer) == 2;
    if (nothing == NULL) return NULL;
    if (frame == NULL) frame = Py_None;
    Py_INCREF(frame);
    PyObject *asked[5] = {r->parts[R_WALKER], frame, inside ? PyTuple_GetItem(outer, 0) : Py_None, inside ? PyTuple_GetItem(outer, 1) : nothing, r->parts[R_MEET]};
    PyObject *key = walk_stack(NULL, asked, 5), *ids = key == NULL ? NULL : PyObject_GetAttr(book, s_ids);
    if (ids != NULL && PyDict_Check(ids)) {
        number = PyDict_GetItemWithError(ids, key);
        Py_XINCREF(number);
        if (number == NULL && !PyErr_Occurred()) number = PyObject_CallMethodObjArgs(book, s_number, key, frame, r->parts[R_SINK], NULL);
    }
    Py_XDECREF(ids);
    Py_XDECREF(key);
    Py_DECREF(frame);
    Py_DECREF(nothing);
    return number;
}

/* Take the next number of the op. No other code runs between the look and the count. */
static int take_number(Recording *r, Call *call) {
    PyObject *numbers = PyObject_GetAttr(r->parts[R_SESSION], s_numbers), *next = NULL;
    if (numbers == NULL || !PyDict_Check(numbers)) {
        Py_XDECREF(numbers);
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "numbers is a dict");
        return -1;
    }
    PyObject *number = PyDict_GetItemWithError(numbers, call->name);
    call->number = number == NULL ? 0 : PyLong_AsLongLong(number);
    if (!PyErr_Occurred()) next = PyLong_FromLongLong(call->number + 1);
    const int failed = next == NULL || PyDict_SetItem(numbers, call->name, next);
    Py_XDECREF(next);
    Py_DECREF(numbers);
    return failed ? -1 : 0;
}

static PyObject *kept(PyObject *value) {
    Py_XINCREF(value);
    return value;
}

/* Where it is made: module, call around it, phase, thread. */
static int find_place_of_call(Recording *r, Call *call, PyObject *here) {
    PyObject *modules = entry_of(here, s_modules), *ordinal = entry_of(here, s_ordinal), *training = r->parts[R_TRAINING];
    call->module = last_of(modules);
    call->open.outside = call->module == NULL;
    if (call->module != NULL && PyUnicode_GetLength(call->module) == 0) Py_CLEAR(call->module);
    call->parent = last_of(entry_of(here, s_calls));
    if (call->parent == NULL) call->parent = kept(entry_of(here, s_region));
    call->phase = kept(entry_of(here, s_phase));
    if (call->phase != NULL && PyUnicode_GetLength(call->phase) == 0) Py_CLEAR(call->phase);
    call->ordinal = ordinal == NULL ? 0 : PyLong_AsLongLong(ordinal);
    if (PyErr_Occurred()) return -1;
    if (training == Py_None) return 0;
    if ((call->open.known = PyObject_GetAttr(training, s_parameters)) == NULL) return -1;
    if (!PyDict_Check(call->open.known)) Py_CLEAR(call->open.known);
    if (call->phase != NULL && PyUnicode_CompareWithASCIIString(call->phase, "optimizer") == 0) return 0;
    if ((call->microbatch = PyObject_GetAttr(training, s_microbatch)) == NULL) return -1;
    if (call->microbatch == Py_None) Py_CLEAR(call->microbatch);
    return 0;
}

static int begin_call(Recording *r, Call *call, PyObject *plan, PyObject *here, PyObject *args, PyObject *kwargs) {
    if (take_number(r, call) || find_place_of_call(r, call, here)) return -1;
    if (r->parts[R_STACKS] != Py_None && (call->stack = number_stack(r, entry_of(here, s_outer_stack))) == NULL) return -1;
    call->open.is_input = 1;
    if (put_arguments(r, &call->open, args, kwargs)) return -1;
    call->open.is_input = call->open.lacked = 0;
    Py_CLEAR(call->open.others);
    if (call->open.watched == NULL) return 0;
    const int grad = is_true(PyObject_CallFunctionObjArgs(r->parts[R_IS_GRAD_ENABLED], NULL));
    if (grad != 1) return grad;
    const int mutates = flag_of(plan, s_mutates);
    if (mutates < 0) return -1;
    if (mutates) { /* what hangs in the graph where may be another afterwards */
        call->edges = PyObject_CallMethodObjArgs(r->parts[R_SIDE], s_edges, call->open.watched, NULL);
        if (call->edges == NULL) return -1;
    }
    PyObject *start = PyObject_CallFunctionObjArgs(r->parts[R_SEQUENCE_NUMBER], NULL);
    if (start == NULL) return -1;
    call->start = PyLong_AsLongLong(start);
    Py_DECREF(start);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *list_tokens(const Open *open) {
    const size_t n = open->tokens.used / sizeof(int64_t);
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; list != NULL && i < n; i++) {
        int64_t token;
        memcpy(&token, open->tokens.bytes + i * sizeof token, sizeof token);
        PyObject *number = PyLong_FromLongLong(token);
        if (number == NULL) Py_CLEAR(list);
        else PyList_SetItem(list, (Py_ssize_t)i, number);
    }
    return list;
}

/* Call a method of `side` with the tokens of the call, which no line will name, and up to two values. */
static int let_go(Recording *r, Call *call, PyObject *method, PyObject *one, PyObject *two) {
    PyObject *tokens = list_tokens(&call->open);
    PyObject *done = tokens == NULL ? NULL : PyObject_CallMethodObjArgs(r->parts[R_SIDE], method, tokens, one, two, NULL);
    Py_XDECREF(tokens);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static int count_recorded(Recording *r) {
    PyObject *before = PyObject_GetAttr(r->parts[R_SESSION], s_recorded);
    PyObject *after = before == NULL ? NULL : PyLong_FromLongLong(PyLong_AsLongLong(before) + 1);
    const int failed = after == NULL || PyObject_SetAttr(r->parts[R_SESSION], s_recorded, after);
    Py_XDECREF(before);
    Py_XDECREF(after);
    return failed ? -1 : 0;
}

static int follow_gradients(Recording *r, Call *call, PyObject *result) {
    PyObject *or_none[] = {call->module, call->parent, call->phase, call->microbatch, call->stack, call->edges};
    for (size_t i = 0; i < sizeof or_none / sizeof *or_none; i++)
        if (or_none[i] == NULL) or_none[i] = Py_None;
    PyObject *given = Py_BuildValue("(OLOOOOOLOOLOy#)", call->name, (long long)call->number, or_none[0], or_none[1], or_none[2], or_none[3], or_none[4],
                                    (long long)call->ordinal, call->open.watched, or_none[5], (long long)call->start, result,
                                    (char *)call->open.arguments.bytes, (Py_ssize_t)call->open.arguments.used);
    PyObject *done = given == NULL ? NULL : PyObject_CallMethodObjArgs(r->parts[R_SIDE], s_follow, given, NULL);
    Py_XDECREF(given);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* After the call; `raised` is the name of the error that it has raised. */
static int finish_call(Recording *r, Call *call, PyObject *func, PyObject *plan, PyObject *result, PyObject *raised) {
    const size_t inputs = call->open.n_slots;
    if (raised != NULL) {
        if (PyUnicode_CompareWithASCIIString(raised, "_StopRecomputationError") == 0) return let_go(r, call, s_discard, NULL, NULL);
        return send_call(r, call, raised) || count_recorded(r) ? -1 : 0;
    }
    if (put_results(r, &call->open, result)) return -1;
    if (call->open.n_slots == inputs) { /* an empty list says nothing of the next call: that may return tensors */
        const int is_empty = (PyTuple_CheckExact(result) || PyList_CheckExact(result)) && PyObject_Size(result) == 0;
        return is_empty ? let_go(r, call, s_discard, NULL, NULL) : let_go(r, call, s_learn, func, plan);
    }
    if (send_call(r, call, NULL) || count_recorded(r)) return -1;
    return call->start >= 0 ? follow_gradients(r, call, result) : 0;
}

/* An error of ours is counted: 0. One of the program is raised again: -1. */
static int settle_error(Recording *r, Call *call) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL) PyException_SetTraceback(error, trace);
    PyObject *done = PyObject_CallMethodObjArgs(r->parts[R_SESSION], s_tool_failed, call->name, error, NULL);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* The beginning was cut short: what was copied is forgotten. If the program did that, the op is not called, and its number is free again. */
static int undo_beginning(Recording *r, Call *call) {
    if (settle_error(r, call)) {
        PyObject *type, *error, *trace, *numbers, *number = NULL, *now;
        PyErr_Fetch(&type, &error, &trace);
        numbers = PyObject_GetAttr(r->parts[R_SESSION], s_numbers);
        now = numbers != NULL && PyDict_Check(numbers) ? PyDict_GetItemWithError(numbers, call->name) : NULL;
        if (now != NULL && PyLong_AsLongLong(now) == call->number + 1) number = PyLong_FromLongLong(call->number);
        if (number != NULL) PyDict_SetItem(numbers, call->name, number);
        Py_XDECREF(number);
        Py_XDECREF(numbers);
        let_go(r, call, s_discard, Py_False, NULL);
        PyErr_Clear();
        PyErr_Restore(type, error, trace);
        return -1;
    }
    return let_go(r, call, s_discard, Py_False, NULL) ? settle_error(r, call) : 0;
}

/* Finish, whatever goes wrong: -1 when the program has raised something into it. The call is recorded then, too. */
static int finish_surely(Recording *r, Call *call, PyObject *func, PyObject *plan, PyObject *result, PyObject *raised) {
    const size_t n_slots = call->open.n_slots, slots_used = call->open.slots.used;
    if (!finish_call(r, call, func, plan, result, raised) || !settle_error(r, call)) return 0;
    if (!call->handed_over) {
        PyObject *type, *error, *trace;
        PyErr_Fetch(&type, &error, &trace);
        call->open.n_slots = n_slots;
        call->open.slots.used = slots_used;
        if (finish_call(r, call, func, plan, result, raised) && settle_error(r, call)) PyErr_Clear();
        PyErr_Restore(type, error, trace);
    }
    return -1;
}

/* The op has raised: its error goes on, unless the program raises another one into our code, which has it as its context. */
static void finish_raised(Recording *r, Call *call, PyObject *func, PyObject *plan) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL) PyException_SetTraceback(error, trace);
    PyObject *name = PyObject_GetAttr((PyObject *)Py_TYPE(error), s_class_name);
    const int failed = name == NULL ? settle_error(r, call) : finish_surely(r, call, func, plan, NULL, name);
    Py_XDECREF(name);
    if (!failed) {
        PyErr_Restore(type, error, trace);
        return;
    }
    PyObject *new_type, *new_error, *new_trace;
    PyErr_Fetch(&new_type, &new_error, &new_trace);
    PyErr_NormalizeException(&new_type, &new_error, &new_trace);
    PyException_SetContext(new_error, error);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    PyErr_Restore(new_type, new_error, new_trace);
}

/* Whether this call is handled here: 1 or 0, -1 on error. */
static int is_for_us(Recording *r, PyObject *plan, PyObject *here, PyObject *kwargs) {
    int yes = flag_of(plan, s_is_quick);
    if (yes != 1) return yes;
    if (entry_of(here, s_recompute) != NULL || entry_of(here, s_ordinal) == NULL) return PyErr_Occurred() ? -1 : 0;
    if (kwargs != NULL && PyDict_GetItemWithError(kwargs, s_out) != NULL) return 0;
    PyObject *blocks = PyObject_GetAttr(r->parts[R_UNWRITTEN], s_blocks);
    if (blocks == NULL) return -1;
    yes = PyDict_Check(blocks) && PyDict_Size(blocks) == 0;
    Py_DECREF(blocks);
    if (!yes) return 0;
    PyObject *modes = PyObject_CallFunctionObjArgs(r->parts[R_COUNT_MODES], NULL); /* none: so looking at a tensor calls nobody */
    if (modes == NULL) return -1;
    yes = PyLong_AsLong(modes) == 0;
    Py_DECREF(modes);
    return PyErr_Occurred() ? -1 : yes;
}

/* 1: handled, `result` is what came of it. 0: not for us. -1: an error before the call. */
static int record_call(PyObject *capsule, PyObject *func, PyObject *plan, PyObject *state, PyObject *args, PyObject *kwargs, PyObject **result) {
    Recording *r = PyCapsule_GetPointer(capsule, RECORDING);
    PyObject *here = r == NULL ? NULL : PyObject_GetAttr(state, s_dict);
    if (here == NULL) return -1;
    int ours = PyDict_Check(here) ? is_for_us(r, plan, here, kwargs) : 0;
    Call call = {.start = -1};
    if (ours == 1 && ((call.name = PyObject_GetAttr(plan, s_name)) == NULL || PyDict_SetItem(here, s_busy, Py_True))) ours = -1;
    if (ours == 1) {
        int begun = !begin_call(r, &call, plan, here, args, kwargs);
        if (!begun && undo_beginning(r, &call)) ours = -1;
        PyDict_SetItem(here, s_busy, Py_False);
        if (ours == 1) *result = PyObject_Call(func, args, kwargs);
        if (ours == 1 && begun) {
            PyObject *type, *error, *trace;
            PyErr_Fetch(&type, &error, &trace);
            PyDict_SetItem(here, s_busy, Py_True);
            PyErr_Restore(type, error, trace);
            if (*result == NULL) finish_raised(r, &call, func, plan);
            else if (finish_surely(r, &call, func, plan, *result, NULL)) Py_CLEAR(*result);
            PyErr_Fetch(&type, &error, &trace);
            PyDict_SetItem(here, s_busy, Py_False);
            PyErr_Restore(type, error, trace);
        }
    }
    drop_call(&call);
    Py_DECREF(here);
    return ours;
}

static void drop_recording(Recording *r) {
    for (int i = 0; i < RECORDING_PARTS; i++) Py_XDECREF(r->parts[i]);
    Py_XDECREF(r->context_capsule);
    PyMem_Free(r);
}

static void free_recording(PyObject *capsule) {
    Recording *r = PyCapsule_GetPointer(capsule, RECORDING);
    if (r != NULL) drop_recording(r);
}

/* recording(context, exchange, parts): None where this torch's table is of another kind. */
static PyObject *make_recording(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *context, *exchange, *parts, *key, *row;
    Py_ssize_t at = 0;
    if (!PyArg_ParseTuple(args, "OOO!:recording", &context, &exchange, &PyTuple_Type, &parts)) return NULL;
    const Context *c = PyCapsule_GetPointer(context, CAPSULE);
    const Exchange *table = c == NULL ? NULL : PyCapsule_GetPointer(exchange, EXCHANGE);
    if (table == NULL) return NULL;
    if (table->version.major != 1 || table->view == NULL) Py_RETURN_NONE;
    if (PyTuple_Size(parts) != RECORDING_PARTS) return PyErr_SetString(PyExc_TypeError, "recording: other parts than expected"), NULL;
    Recording *r = PyMem_Calloc(1, sizeof *r);
    if (r == NULL) return PyErr_NoMemory();
    r->c = c;
    r->exchange = table;
    r->context_capsule = kept(context);
    for (int i = 0; i < RECORDING_PARTS; i++) r->parts[i] = kept(PyTuple_GetItem(parts, i));
    while (PyDict_Next(c->dtypes, &at, &key, &row)) { /* the context holds them, and has looked at them */
        const long long code = PyLong_AsLongLong(PyTuple_GetItem(row, 1));
        Py_ssize_t n;
        const char *name = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(row, 0), &n);
        if (name == NULL || code < 0 || code >= DTYPES) continue;
        r->rows[code].dtype = key;
        r->rows[code].name = name;
        r->rows[code].length = (size_t)n;
        r->rows[code].size = PyLong_AsLongLong(PyTuple_GetItem(row, 2));
    }
    PyObject *capsule = PyErr_Occurred() ? NULL : PyCapsule_New(r, RECORDING, free_recording);
    if (capsule == NULL) drop_recording(r);
    return capsule;
}
